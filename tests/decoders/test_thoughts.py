"""A budget of thought tokens: two parts of a response, of every decoder, and what stands between them."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from refusion_eval.api import check_prompt, decoder_settings, generate, generate_stream, load_model, num_positions
from refusion_eval.decoders.thoughts import parts
from refusion_eval.errors import ConfigError
from refusion_eval.types import Stop, Trace, draw_key
from tests.decoders.test_all_in_one_batch import SETTINGS, prompt

FORCED = [7, 8, 9]
EOS = (188,)
BUDGET, LENGTH = 24, 48


def load(shared, name, monkeypatch, end_of_thought=lambda prompt, response: FORCED):
    """A tiny checkpoint whose tokenizer finds the end of a thought as given; by default one is always open."""
    model = load_model(str(shared / "parity" / "baselines" / "checkpoints" / name), dtype="float32", device="cpu")
    monkeypatch.setitem(vars(model), "tokenizer", SimpleNamespace(end_of_thought=end_of_thought))
    return model


def settings_of(model, decoder, **changes):
    chosen = {"gen_length": LENGTH, "eos_ids": EOS, **changes}
    return [decoder_settings(model, decoder, **{**chosen, **more}) for more in SETTINGS.get(decoder, [{}])]


@pytest.mark.parametrize("name", ["llada_2", "dream_1", "qwen3_2"])
def test_every_decoder_decodes_both_parts_as_requests_of_their_own(shared: Path, name: str, monkeypatch):
    model = load(shared, name, monkeypatch)
    requests = [
        (decoder, prompt(number), settings)
        for number, decoder in enumerate(model.decoders)
        for settings in settings_of(model, decoder, thought_budget=BUDGET)
    ]
    together = dict(generate_stream(model, requests, 8))
    assert len(requests) > 3
    halves = [list(parts(settings)) for _, _, settings in requests]
    thoughts = dict(
        generate_stream(model, [(*one[:2], half[0]) for one, half in zip(requests, halves, strict=True)], 8)
    )
    answered = [number for number, thought in thoughts.items() if thought.stop == "length"]
    assert len(answered) > len(requests) / 2
    seconds = []
    for number in answered:
        (decoder, prompt_ids, settings), tokens = requests[number], thoughts[number].tokens
        of_answer = replace(halves[number][1], seed=draw_key(settings.seed, len(tokens)) >> 1)
        seconds.append((decoder, [*prompt_ids, *tokens, *FORCED], of_answer))
    answers = dict(zip(answered, dict(sorted(generate_stream(model, seconds, 8))).values(), strict=True))
    for number, whole in together.items():
        decoder, thought = requests[number][0], thoughts[number]
        if number in answers:
            answer = answers[number]
            assert whole.tokens == (*thought.tokens, *FORCED, *answer.tokens), decoder
            assert whole.num_forwards == thought.num_forwards + answer.num_forwards
            assert (whole.stop, whole.num_forced) == (answer.stop, len(FORCED))
        else:
            assert (whole.tokens, whole.num_forced) == (thought.tokens, 0)
        fixed = whole.trace.fixed_tokens()
        assert tuple(fixed[position] for position in range(len(whole.tokens))) == whole.tokens, decoder
        assert Trace.from_json(whole.trace.to_json()) == whole.trace
        assert list(whole.trace.of(Stop)) == [Stop(whole.num_forwards - 1, whole.stop, len(whole.tokens))]


@pytest.mark.parametrize("name", ["llada_2", "qwen3_2"])
def test_a_budget_of_the_whole_response_changes_nothing(shared: Path, name: str, monkeypatch):
    model = load(shared, name, monkeypatch)
    for decoder in model.decoders:
        plain, ample = settings_of(model, decoder)[0], settings_of(model, decoder, thought_budget=LENGTH)[0]
        both = dict(generate_stream(model, [(decoder, prompt(3), settings) for settings in (plain, ample)], 2))
        assert (both[0].tokens, both[0].num_forwards) == (both[1].tokens, both[1].num_forwards)
        assert both[1].num_forced == 0


@pytest.fixture
def free(shared, monkeypatch):
    """A checkpoint in whose responses no thought is open once they have begun."""
    return load(shared, "qwen3_2", monkeypatch, lambda prompt, response: [] if response else FORCED)


def test_autoregressive_decoding_does_not_notice_a_budget_that_no_thought_reaches(free):
    plain, within = (
        generate(free, prompt(3), "autoregressive", gen_length=LENGTH, eos_ids=(), **budget)
        for budget in ({}, {"thought_budget": 10})
    )
    assert within.tokens == plain.tokens
    assert (within.num_forwards, within.num_forced) == (LENGTH, 0)


def test_a_budget_of_nothing_begins_with_the_end_of_the_thought(free):
    within = generate(free, prompt(3), "autoregressive", gen_length=5, eos_ids=(), thought_budget=0)
    answer = generate(free, [*prompt(3), *FORCED], "autoregressive", gen_length=5, eos_ids=())
    assert within.tokens == (*FORCED, *answer.tokens)
    assert (within.num_forwards, within.num_forced) == (5, 3)
    assert min(within.trace.fixed_at().values()) == 0  # no token is older than the first forward


@pytest.mark.parametrize("when", [6, 14])
def test_a_stop_string_ends_the_response_in_either_part(shared, monkeypatch, when):
    model = load(shared, "qwen3_2", monkeypatch)
    rule = {"stop_rule": lambda tokens: len(tokens) == when}
    stopped = generate(model, prompt(3), "autoregressive", gen_length=20, eos_ids=(), thought_budget=8, **rule)
    assert (stopped.stop, len(stopped.tokens)) == ("stop_string", when)


def test_a_budget_that_no_canvas_can_have_is_refused(shared, monkeypatch):
    model = load(shared, "llada_2", monkeypatch)
    with pytest.raises(ConfigError, match=r"thought_budget=20: .* gen_length is 20 and block_length 8"):
        generate(model, prompt(3), "llada", gen_length=48, block_length=8, thought_budget=20)


def test_the_context_holds_both_parts_and_what_stands_between(free):
    settings = decoder_settings(free, "autoregressive", gen_length=10, eos_ids=(), thought_budget=4)
    room = free.config.max_positions - 10 - len(FORCED)
    check_prompt(free, [1] * room, num_positions(free, settings))
    with pytest.raises(ConfigError, match="exceed the context"):
        check_prompt(free, [1] * (room + 1), num_positions(free, settings))


@pytest.fixture(scope="module")
def tokenizer():
    return load_model("embedded").tokenizer


@pytest.mark.parametrize(
    ("prompt_text", "response", "ended"),
    [
        ("Q<think>\n", "abc", "\n</think>\n\n"),
        ("Q<think>\n", "", "\n</think>\n\n"),
        ("Q<think>\n", "abc</think>4", ""),
        ("Q", "<think>abc", "\n</think>\n\n"),
        ("Q", "<think>abc</think>4", ""),
        ("Q", "4", ""),
        ("Q", "", "<think>\n\n</think>\n\n"),
        ("Q<think>\n\n</think>\n\n", "", ""),
        ("Q<think>\n\n</think>\n\n", "<think>a", "\n</think>\n\n"),
    ],
)
def test_an_open_thought_is_ended_as_templates_end_it(tokenizer, monkeypatch, prompt_text, response, ended):
    monkeypatch.setattr(tokenizer.inner, "chat_template", "<think></think>")
    monkeypatch.delitem(vars(tokenizer), "thought_end", raising=False)
    tokens = tokenizer.end_of_thought(tokenizer.encode(prompt_text), tokenizer.encode(response))
    assert tokenizer.decode(tokens) == ended


def test_a_template_without_thoughts_is_one_clear_error():
    with pytest.raises(ConfigError, match=r"the chat template has no </think>.*leave thought_budget out"):
        generate(load_model("embedded"), "Q", gen_length=96, thought_budget=16)
