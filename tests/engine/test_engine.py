"""The engine: cached equals uncached, a batch equals one by one, forwards are counted, and failures stay alone."""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refusion_eval.decoders import autoregressive
from refusion_eval.decoders.autoregressive import AutoregressiveSettings
from refusion_eval.engine.engine import Request
from refusion_eval.errors import DecodeError
from refusion_eval.models import attention as attention_module
from refusion_eval.models import device as devices
from refusion_eval.types import (
    Commit,
    Forward,
    ForwardDone,
    Read,
    Response,
    Segment,
    bidirectional,
    block_causal,
    causal,
    draw_key,
    groups,
)
from tests.engine.random_model import VOCAB_SIZE, dense_logits, random_engine
from tests.examples import examples


@dataclass
class Script:
    """Forwards to be asked for, in order, and the readouts that came back."""

    forwards: list[Forward] = field(default_factory=list)
    readouts: list = field(default_factory=list)


def play(prompt, script, trace):
    for forward in script.forwards:
        script.readouts.append((yield forward))
    return Response((1,), "length")


def random_attention(chooser, num_rows):
    cut = chooser.randrange(num_rows + 1)
    sizes = [size for size in (cut, num_rows - cut) if size]
    hypotheses = (
        (Segment(cut), Segment(num_rows - cut, sees=((0, chooser.randint(0, cut)),))) if len(sizes) == 2 else ()
    )
    patterns = (causal(num_rows), bidirectional(num_rows), groups(sizes), block_causal(sizes), hypotheses)
    return chooser.choice([pattern for pattern in patterns if pattern])


def random_script(seed):
    """Random forwards with random commits, and for every row ever computed what it sees of all rows."""
    chooser = random.Random(seed)
    script, tokens, positions, seen, cached, previous = Script(), [], [], [], [], []
    for _ in range(chooser.randint(1, 6)):
        kept = chooser.sample(range(len(previous)), chooser.randint(0, len(previous)))
        if chooser.random() < 0.4:
            kept = list(range(len(kept)))
        keep = chooser.randint(0, len(cached)) if chooser.random() < 0.3 else None
        cached = cached[:keep] + [previous[row] for row in kept]
        width, start = chooser.randint(1, 6), len(tokens)
        attention = random_attention(chooser, width)
        tokens += [chooser.randrange(VOCAB_SIZE) for _ in range(width)]
        positions += chooser.sample(range(100), width)
        seen += [
            [*cached, *(start + key for key in range(width) if attention_module.visible(attention)[row, key])]
            for row in range(width)
        ]
        previous = list(range(start, start + width))
        commit = Commit(kept, keep)
        reads = (Read(range(width), entropy=True, margin=True),)
        script.forwards.append(Forward(tokens[start:], positions[start:], attention, reads, commit))
    visible = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    for row, keys in enumerate(seen):
        visible[row, keys] = True
    return script, tokens, positions, visible


@given(st.integers(0, 10**9))
@examples(60)
def test_any_commits_and_drops_equal_one_uncached_forward(seed):
    engine = random_engine()
    script, tokens, positions, visible = random_script(seed)
    engine.run(play, [0], script)
    logits = dense_logits(engine.model, tokens, positions, visible)
    probs = logits.softmax(dim=-1)
    got = {name: np.concatenate([getattr(r, name) for (r,) in script.readouts]) for name in ("tokens", "probs")}
    assert got["tokens"].tolist() == logits.argmax(dim=-1).tolist()
    np.testing.assert_allclose(got["probs"], probs.max(dim=-1).values, rtol=1e-4)


def wander(prompt, seed, trace):
    """A decoder whose every forward depends on what it read: widths, patterns, commits and tokens."""
    chooser = random.Random(seed)
    length = len(prompt)
    (readout,) = yield Forward(prompt, range(length), causal(length), (Read([length - 1]),), kind="prefill")
    commit, tokens = Commit(range(length)), [int(readout.tokens[0])]
    for step in range(chooser.randint(1, 8)):
        width = chooser.randint(1, 7)
        row_tokens = [(tokens[-1] + offset) % VOCAB_SIZE for offset in range(width)]
        rows = range(length, length + width)
        sampled = Read(range(width), temperature=0.8, draws=tuple(draw_key(seed, step, row) for row in range(width)))
        reads = (Read(range(width), given=row_tokens, entropy=True), sampled)
        greedy, drawn = yield Forward(row_tokens, rows, random_attention(chooser, width), reads, commit)
        kept = sorted(chooser.sample(range(width), chooser.randint(0, width)))
        commit, length = Commit(kept), length + len(kept)
        tokens += [*greedy.tokens.tolist(), *drawn.tokens.tolist()]
    return Response(tuple(tokens), "length")


def wander_requests(count):
    chooser = random.Random(7)
    prompts = [[chooser.randrange(VOCAB_SIZE) for _ in range(chooser.randint(1, 20))] for _ in range(count)]
    return [Request(wander, prompt, seed) for seed, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def decoded_alone():
    engine = random_engine()
    return [engine.run(request.decode, request.prompt, request.settings) for request in wander_requests(17)]


@pytest.mark.parametrize("max_padding", [0.0, 1.5, float("inf")])
@pytest.mark.parametrize("batch_size", [1, 2, 5, 64])
def test_tokens_and_traces_are_the_same_at_any_batch_size(decoded_alone, batch_size, max_padding, monkeypatch):
    monkeypatch.setattr(attention_module, "MAX_CPU_PADDING", max_padding)
    together = dict(random_engine().run_many(iter(wander_requests(17)), batch_size))
    assert sorted(together) == list(range(17))
    for index, expected in enumerate(decoded_alone):
        assert together[index].tokens == expected.tokens
        assert together[index].trace == expected.trace


def test_requests_are_taken_as_places_become_free():
    engine, taken = random_engine(), []

    def requests():
        for index, request in enumerate(wander_requests(5)):
            taken.append(index)
            yield request

    running = engine.run_many(requests(), 2)
    next(running)
    assert len(taken) == 2
    assert len(list(running)) == 4


def test_a_batch_that_ends_no_request_for_a_while_says_how_far_it_is(monkeypatch, caplog):
    def decode(prompt, settings, trace):
        for number in range(3):
            yield Forward([1], [number], causal(1), ())
            trace.fix([number], [7])
        return Response([7, 7, 7], "eos")

    monkeypatch.setattr("refusion_eval.engine.batch.SILENT_SECONDS", 0)
    with caplog.at_level("INFO", logger="refusion_eval"):
        assert len(list(random_engine().run_many([Request(decode, [1], None)] * 2, 2))) == 2
    assert caplog.messages == [f"2 requests at a time: {count} tokens in the unfinished responses" for count in (2, 4)]


def test_forwards_are_counted_with_their_rows_and_cached_rows():
    def decode(prompt, settings, trace):
        yield Forward([1, 2, 3], [0, 1, 2], causal(3), (), kind="first")
        yield Forward([4], [3], causal(1), (), Commit([0, 2]), kind="second")
        yield Forward([5], [3], causal(1), (Read([0]),), kind="third")
        return Response((), "length")

    decoded = random_engine().run(decode, [1], None)
    assert list(decoded.trace.of(ForwardDone)) == [
        ForwardDone(0, "first", 3, 0),
        ForwardDone(1, "second", 1, 2),
        ForwardDone(2, "third", 1, 2),
    ]
    assert decoded.num_forwards == 3
    assert decoded.seconds > 0


def test_the_buffer_grows_when_needed():
    engine = random_engine()
    prompt = [index % VOCAB_SIZE for index in range(1500)]
    script = Script([Forward(prompt[:700], range(700), causal(700), ())])
    script.forwards.append(Forward(prompt[700:], range(700, 1500), causal(800), (Read([799]),), Commit(range(700))))
    engine.run(play, [0], script)
    whole = Script([Forward(prompt, range(1500), causal(1500), (Read([1499]),))])
    engine.run(play, [0], whole)
    np.testing.assert_allclose(script.readouts[1][0].probs, whole.readouts[0][0].probs, rtol=1e-4)


def few_shot_requests(count, num_shared=150):
    """Requests that begin with the same long text, the first one without it."""
    shared = [index * index % VOCAB_SIZE for index in range(num_shared)]
    requests = wander_requests(count)
    return requests[:1] + [Request(wander, [*shared, *r.prompt], r.settings) for r in requests[1:]]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_common_beginning_is_computed_once_and_changes_no_token(batch_size, monkeypatch):
    engine, requests, computed = random_engine(), few_shot_requests(9), []
    alone = [engine.run(request.decode, request.prompt, request.settings) for request in requests]
    hidden = engine.model.hidden
    monkeypatch.setattr(
        engine.model, "hidden", lambda tokens_T, *rest: computed.append(len(tokens_T)) or hidden(tokens_T, *rest)
    )
    together = dict(engine.run_many(requests, batch_size))
    assert [together[index].tokens for index in range(9)] == [decoded.tokens for decoded in alone]
    assert [together[index].trace for index in range(9)] == [decoded.trace for decoded in alone]
    asked = sum(event.rows for decoded in alone for event in decoded.trace.of(ForwardDone))
    # The beginning is computed by those that start together with the first one that has it.
    assert asked - 150 * 7 <= sum(computed) <= asked - 150 * (8 - batch_size)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_samples_of_one_prompt_compute_it_once_but_for_what_is_read(batch_size, monkeypatch):
    engine, computed = random_engine(), []
    common = [index % VOCAB_SIZE for index in range(40)]  # of both prompts, as that of a chat template
    prompts = [[*common, *((index + end) % VOCAB_SIZE for index in range(end))] for end in (20, 30)]
    settings = [AutoregressiveSettings(gen_length=6, temperature=1.0, seed=seed) for seed in range(4)]
    requests = [Request(autoregressive.decode, prompt, one) for prompt in prompts for one in settings]
    alone = [engine.run(*request) for request in requests]
    assert len({decoded.tokens for decoded in alone}) == 8
    hidden = engine.model.hidden
    monkeypatch.setattr(
        engine.model, "hidden", lambda tokens_T, *rest: computed.append(len(tokens_T)) or hidden(tokens_T, *rest)
    )
    together = dict(engine.run_many(requests, batch_size))
    assert [together[index].tokens for index in range(8)] == [decoded.tokens for decoded in alone]
    assert [together[index].trace for index in range(8)] == [decoded.trace for decoded in alone]
    prefills = [40 + 20, *[1] * 3, 30, *[1] * 3]
    assert sum(computed) == sum(prefills) + 8 * 5
    if (
        batch_size == 8
    ):  # the other samples of the first prompt begin at the second call, those of the second at the third
        assert len(computed) == 2 + 6


def long_requests(count):
    """Requests of 600 to 800 rows, beyond the first capacity."""
    return [Request(wander, [i % VOCAB_SIZE for i in range(600 + 40 * n)], n) for n in range(count)]


def test_where_memory_runs_short_the_batch_shrinks_and_every_token_stays():
    engine, requests = random_engine(), [*wander_requests(4), *long_requests(5)]
    expected = [engine.run(request.decode, request.prompt, request.settings).tokens for request in requests]
    bytes_per_row = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, head width, float32
    engine.kv_budget = int(4 * 600 * bytes_per_row / 0.8)
    together = dict(engine.run_many(requests, 4))
    assert [together[index].tokens for index in range(9)] == expected


def test_the_batch_grows_back_once_a_long_request_is_over(monkeypatch):
    engine, widths = random_engine(), []
    requests = [*long_requests(5)[-1:], *wander_requests(17)]
    expected = [engine.run(request.decode, request.prompt, request.settings).tokens for request in requests]
    engine.kv_budget = int(4 * 600 * 2 * 2 * 2 * 8 * 4 / 0.8)
    step = engine._step
    monkeypatch.setattr(
        engine, "_step", lambda cache, batch, *rest: widths.append(len(batch)) or step(cache, batch, *rest)
    )
    together = dict(engine.run_many(requests, 4))
    assert [together[index].tokens for index in range(18)] == expected
    shrunk = widths.index(3)
    assert 4 in widths[shrunk:]


def test_the_batch_stays_small_while_a_long_request_waits_for_its_place(monkeypatch):
    """A request that was removed for its length would be removed again and again, with all that it has decoded."""
    engine, starts = random_engine(), []
    engine.kv_budget = int(4 * 600 * 2 * 2 * 2 * 8 * 4 / 0.8)
    start = engine._start
    monkeypatch.setattr(
        engine, "_start", lambda cache, place, index, *rest: starts.append(index) or start(cache, place, index, *rest)
    )
    requests = [*wander_requests(9)[:3], *long_requests(2), *wander_requests(17)[9:]]
    assert len(list(engine.run_many(requests, 4))) == len(requests)
    assert max(starts.count(index) for index in range(len(requests))) <= 3


def test_the_buffer_of_a_batch_stays_within_its_budget(monkeypatch):
    engine, sizes = random_engine(), []
    bytes_per_row = 2 * 2 * 2 * 8 * 4
    engine.kv_budget = 3000 * bytes_per_row
    step = engine._step
    monkeypatch.setattr(
        engine,
        "_step",
        lambda cache, *rest: sizes.append(cache.keys.nbytes + cache.values.nbytes) or step(cache, *rest),
    )
    assert len(list(engine.run_many([*wander_requests(4), *long_requests(5)], 8))) == 9
    assert 0 < max(sizes) <= engine.kv_budget


def test_a_request_beyond_the_budget_fails_alone():
    engine, requests = random_engine(), [*wander_requests(2), *long_requests(1), *wander_requests(2)]
    engine.kv_budget = 560 * 2 * 2 * 2 * 8 * 4
    outcomes = dict(engine.run_many(requests, 4))
    assert "KV budget" in str(outcomes[2])
    assert all(not isinstance(outcomes[index], DecodeError) for index in (0, 1, 3, 4))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_of_a_batch_the_request_beyond_the_budget_fails_and_no_other(place):
    engine, requests = random_engine(), wander_requests(5)
    expected = [engine.run(request.decode, request.prompt, request.settings).tokens for request in requests]
    requests.insert(place, Request(wander, [index % VOCAB_SIZE for index in range(2500)], 0))
    engine.kv_budget = int(3 * 600 * 2 * 2 * 2 * 8 * 4 / 0.8)
    outcomes = dict(engine.run_many(requests, 3))
    assert "a sequence of 2500 rows exceeds the KV budget" in str(outcomes.pop(place))
    assert [outcomes[index].tokens for index in sorted(outcomes)] == expected


def fail(prompt, settings, trace):
    yield Forward([1], [0], causal(1), (Read([0]),))
    raise ZeroDivisionError("by design")


BAD_FORWARDS = {
    "token": Forward([VOCAB_SIZE], [0], causal(1), ()),
    "position": Forward([1], [-1], causal(1), ()),
    "sizes": Forward([1, 2], [0, 1], causal(3), ()),
    "empty": Forward([], [], (), ()),
    "read": Forward([1], [0], causal(1), (Read([1]),)),
    "draws": Forward([1], [0], causal(1), (Read([0], temperature=1.0),)),
    "commit": Forward([1], [0], causal(1), (), Commit([0])),
    "segment": Forward([1], [0], (Segment(1, sees=((0, 1),)),), ()),
}


@pytest.mark.parametrize("name", BAD_FORWARDS)
def test_impossible_forwards_are_refused(name):
    with pytest.raises(DecodeError):
        random_engine().run(play, [0], Script([BAD_FORWARDS[name]]))


def test_a_failing_request_leaves_the_others_alone():
    engine, requests = random_engine(), wander_requests(6)
    expected = [engine.run(request.decode, request.prompt, request.settings).tokens for request in requests]
    requests.insert(1, Request(fail, [1], None))
    requests.insert(4, Request(play, [1], Script([BAD_FORWARDS["commit"]])))
    outcomes = dict(engine.run_many(requests, 3))
    assert isinstance(outcomes[1].__cause__, ZeroDivisionError)
    assert isinstance(outcomes[4], DecodeError)
    assert [outcomes[index].tokens for index in (0, 2, 3, 5, 6, 7)] == expected


@pytest.mark.parametrize("max_padding", [0.0, float("inf")])
def test_logits_that_are_not_finite_end_only_their_request(max_padding, monkeypatch):
    monkeypatch.setattr(attention_module, "MAX_CPU_PADDING", max_padding)
    engine, requests = random_engine(), wander_requests(6)
    engine.model.weights.embedding[0] = float("nan")
    requests = [Request(wander, [token or 1 for token in r.prompt], r.settings) for r in requests]
    requests.insert(0, Request(wander, [0], 0))
    outcomes = dict(engine.run_many(requests, 2))
    assert "not finite" in str(outcomes[0])
    for index, request in enumerate(requests[1:], start=1):
        try:
            expected = engine.run(request.decode, request.prompt, request.settings).tokens
        except DecodeError:
            assert isinstance(outcomes[index], DecodeError)
        else:
            assert outcomes[index].tokens == expected


def test_energy_belongs_to_requests_that_are_decoded_alone(monkeypatch):
    counter = iter([10.0, 12.5])
    monkeypatch.setattr(devices, "energy_counter", lambda device: lambda: next(counter))
    engine, (request, *_) = random_engine(), wander_requests(1)
    assert engine.run(request.decode, request.prompt, request.settings).joules == 2.5
    ((_, decoded),) = engine.run_many([request], 1)
    assert decoded.joules is None
