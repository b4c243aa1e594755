"""Forwards that reuse features against an oracle that computes every row and then takes the old one where it must."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refusion_eval.engine.engine import Engine, Request
from refusion_eval.engine.features import hidden_with_reuse, least_alike
from refusion_eval.engine.readout import hidden_of
from refusion_eval.engine.recorded import recorder
from refusion_eval.errors import DecodeError
from refusion_eval.models.cache import KVCache
from refusion_eval.models.layers import swiglu
from refusion_eval.models.transformer import Transformer, rms_norm, rotate
from refusion_eval.models.weights import Weights
from refusion_eval.types import Commit, FeatureReuse, Forward, Read, Response, bidirectional, causal
from tests.decoders.baselines import forwards_of
from tests.engine.random_model import CPU, VOCAB_SIZE, random_engine, random_transformer
from tests.engine.test_engine import Script, play, wander_requests
from tests.examples import examples


def with_bias(model: Transformer) -> Transformer:
    """The same without norms of queries and keys, but with a bias, as Dream has it."""
    generator = torch.Generator().manual_seed(1)
    layers = tuple(
        replace(layer, qk_norm=None, qkv_bias=torch.randn(layer.qkv.shape[0], generator=generator))
        for layer in model.weights.layers
    )
    weights = model.weights
    return Transformer(model.config, Weights(weights.embedding, layers, weights.final_norm, weights.head))


class Oracle:
    """dLLM-Cache over whole tensors: every row is computed, and the old one put back where it was not to be."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.old: list[dict[str, torch.Tensor]] = [{} for _ in model.weights.layers]

    def _keep(self, layer: int, name: str, new: torch.Tensor, computed: list[bool]) -> torch.Tensor:
        if name in self.old[layer]:
            old = self.old[layer][name]
            new = torch.stack([new[row] if is_new else old[row] for row, is_new in enumerate(computed)])
        self.old[layer][name] = new
        return new

    def hidden(self, tokens: list[int], reuse: FeatureReuse) -> torch.Tensor:
        config, num_rows = self.model.config, len(tokens)
        num_heads, num_kv_heads, eps = config.num_heads, config.num_kv_heads, config.rms_norm_eps
        adapts = not reuse.refresh_response and reuse.transfer_ratio > 0
        cos, sin = self.model.rotary.lookup(torch.arange(num_rows), num_rows - 1)
        x = self.model.weights.embedding[torch.tensor(tokens)]
        for index, layer in enumerate(self.model.weights.layers):
            is_response = [row >= reuse.num_prompt for row in range(num_rows)]
            computed = [reuse.refresh_response if response else reuse.refresh_prompt for response in is_response]
            qkv = rms_norm(x, layer.input_norm, eps) @ layer.qkv.T
            qkv = qkv if layer.qkv_bias is None else qkv + layer.qkv_bias
            qkv = qkv.view(num_rows, -1, config.head_dim)
            qk, v = qkv[:, : num_heads + num_kv_heads], qkv[:, num_heads + num_kv_heads :]
            qk = qk if layer.qk_norm is None else rms_norm(qk, layer.qk_norm, eps)
            q, k = rotate(qk, cos, sin).split([num_heads, num_kv_heads], dim=1)
            if adapts:
                response = range(reuse.num_prompt, num_rows)
                old = self.old[index]["v"].flatten(1)
                alike = {row: float(torch.cosine_similarity(v.flatten(1)[row], old[row], dim=0)) for row in response}
                order = sorted(response, key=lambda row: (alike[row], row))
                for row in order[: int(len(response) * reuse.transfer_ratio)]:
                    computed[row] = True
            with_values = [new or (adapts and response) for new, response in zip(computed, is_response, strict=True)]
            k, v = self._keep(index, "k", k, computed), self._keep(index, "v", v, with_values)
            shared = num_heads // num_kv_heads
            scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(shared, 1)) * config.head_dim**-0.5
            attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(shared, 1)).flatten(1)
            x = x + self._keep(index, "attended", attended @ layer.out.T, computed)
            mlp = swiglu(rms_norm(x, layer.mlp_norm, eps) @ layer.gate_up.T) @ layer.down.T
            x = x + self._keep(index, "mlp", mlp, computed)
        return x


def forward_of(tokens, reuse, rows=None):
    num_rows = len(tokens)
    reads = (Read(range(num_rows) if rows is None else rows),)
    return Forward(tokens, range(num_rows), bidirectional(num_rows), reads, approximation=reuse)


def changing_texts(seed, num_forwards, num_prompt, num_response):
    """Texts of which the prompt stays and the response changes: no two rows are alike but for rounding."""
    chooser = random.Random(seed)
    tokens = [chooser.randrange(VOCAB_SIZE) for _ in range(num_prompt + num_response)]
    for _ in range(num_forwards):
        yield tokens[:]
        for row in range(num_prompt, len(tokens)):
            tokens[row] = (tokens[row] + chooser.randint(1, VOCAB_SIZE - 1)) % VOCAB_SIZE


@given(
    seed=st.integers(0, 10**6),
    sizes=st.tuples(st.integers(0, 6), st.integers(0, 9)).filter(any),
    intervals=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    ratio=st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.8, 1.0]),
    biased=st.booleans(),
)
@examples(80, derandomize=True)
def test_any_schedule_gives_what_the_oracle_gives(seed, sizes, intervals, ratio, biased):
    model = random_transformer(seed % 5, num_layers=3)
    model = with_bias(model) if biased else model
    cache, oracle = KVCache(model.config, 1, 8, torch.float32, CPU), Oracle(model)
    for step, tokens in enumerate(changing_texts(seed, 7, *sizes)):
        reuse = FeatureReuse(sizes[0], step % intervals[0] == 0, step % intervals[1] == 0, ratio)
        got = hidden_with_reuse(model, cache, 0, forward_of(tokens, reuse), reuse)
        torch.testing.assert_close(got, oracle.hidden(tokens, reuse), atol=1e-3, rtol=1e-3)


def test_computing_all_rows_is_a_plain_forward():
    model = random_transformer(2, num_layers=3)
    for tokens in changing_texts(3, 4, 5, 7):
        cache = KVCache(model.config, 1, 16, torch.float32, CPU)
        plain = hidden_of(model, cache, [forward_of(tokens, None)], "sdpa")
        reusing = hidden_of(model, cache, [forward_of(tokens, FeatureReuse(5))], "sdpa")
        assert torch.equal(plain, reusing)


def test_a_share_of_1_computes_the_whole_response():
    model = random_transformer(2, num_layers=3)
    caches = [KVCache(model.config, 1, 8, torch.float32, CPU) for _ in range(2)]
    for step, tokens in enumerate(changing_texts(3, 5, 5, 7)):
        refresh = FeatureReuse(5, step == 0, True)
        adapt = FeatureReuse(5, step == 0, step == 0, 1.0)
        one, other = (
            hidden_with_reuse(model, cache, 0, forward_of(tokens, reuse), reuse)
            for cache, reuse in zip(caches, (refresh, adapt), strict=True)
        )
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_what_is_not_computed_follows_its_token_alone():
    model = random_transformer(2, num_layers=3)
    cache = KVCache(model.config, 1, 8, torch.float32, CPU)
    first, second = [3, 1, 4, 1, 5, 9], [3, 1, 4, 8, 5, 9]
    before = hidden_with_reuse(model, cache, 0, forward_of(first, FeatureReuse(2)), FeatureReuse(2))
    stale = FeatureReuse(2, False, False, 0.0)
    after = hidden_with_reuse(model, cache, 0, forward_of(second, stale), stale)
    embedding = model.weights.embedding
    wanted = torch.zeros_like(before)
    wanted[3] = embedding[8] - embedding[1]
    torch.testing.assert_close(after - before, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("num_heads", [1, 2])
def test_rows_that_changed_least_alike_come_first_and_among_equals_the_first(num_heads):
    old = torch.tensor([[1.0, 0], [0, 1], [1, 1], [1, 0], [2, 0]])[:, None].repeat(1, num_heads, 1)
    new = torch.tensor([[1.0, 0], [1, 0], [1, 0], [5, 0], [2, 0]])[:, None].repeat(1, num_heads, 1)
    assert [least_alike(new, old, count).tolist() for count in range(5)] == [[], [1], [1, 2], [1, 2, 0], [1, 2, 0, 3]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_does_not_choose_among_rows_that_did_not_change(dtype):
    generator = torch.Generator().manual_seed(0)
    old, noise = torch.randn(2, 200, 2, 64, generator=generator)
    new = old * (1 + 1e-6 * noise)  # before they are rounded to the dtype
    new[150] = -old[150]
    assert least_alike(new.to(dtype), old.to(dtype), 5).tolist() == [150, 0, 1, 2, 3]


def reusing(prompt, ratio, trace):
    """Fills a response of 8 from the right, reusing features, and at last reads once more with plain forwards."""
    tokens, length = [*prompt, *[0] * 8], len(prompt) + 8
    for step in range(7):
        reuse = FeatureReuse(len(prompt), step % 4 == 0, step % 3 == 0, ratio)
        (readout,) = yield forward_of(tokens, reuse, [length - 1 - step])
        tokens[length - 1 - step] = int(readout.tokens[0])
        if step == 4:
            rows = range(length)
            (readout,) = yield Forward(tokens[:], rows, causal(length), (Read([0]),))
            (readout,) = yield Forward([1, 2], [length, length + 1], causal(2), (Read([1]),), Commit(rows))
            (readout,) = yield Forward(tokens[:], rows, bidirectional(length), (Read([0]),), Commit(keep=0))
            tokens[len(prompt)] = int(readout.tokens[0])
    return Response(tuple(tokens), "length")


def reusing_requests():
    prompts = [request.prompt for request in wander_requests(8)]
    return [Request(reusing, prompt, ratio) for prompt in prompts for ratio in (0.0, 0.25, 0.6, 1.0)]


@pytest.fixture(scope="module")
def mixed_requests():
    """Requests that reuse features and others in turn, and what each of them gives alone."""
    requests = [request for pair in zip(reusing_requests(), wander_requests(32), strict=True) for request in pair]
    engine = random_engine(1)
    return requests, [engine.run(request.decode, request.prompt, request.settings) for request in requests]


@pytest.mark.parametrize("batch_size", [1, 2, 5, 16])
def test_a_batch_changes_nothing_among_others(mixed_requests, batch_size):
    requests, alone = mixed_requests
    together = dict(random_engine(1).run_many(requests, batch_size))
    for number, expected in enumerate(alone):
        assert together[number].tokens == expected.tokens
        assert forwards_of(together[number]) == forwards_of(expected)


def test_requests_that_begin_again_for_want_of_memory_end_the_same():
    model = random_transformer(1)
    small = Engine(model, "sdpa", kv_budget=2**20)
    requests = [Request(reusing, [1, 2, 3] * (50 * number + 1), 0.25) for number in range(5)]
    for number, out in small.run_many(requests, 5):
        alone = random_engine(1).run(reusing, requests[number].prompt, 0.25)
        assert out.tokens == alone.tokens


def test_fixed_shapes_leave_such_forwards_alone():
    model = random_transformer(1)
    free, static = Engine(model, "sdpa"), Engine(model, "sdpa", record=recorder(model.device))
    for request in reusing_requests()[:8]:
        outs = [engine.run(request.decode, request.prompt, request.settings) for engine in (free, static)]
        assert outs[0].tokens == outs[1].tokens


ALL = FeatureReuse(2)
STALE = FeatureReuse(2, False, True)


@pytest.mark.parametrize(
    ("forwards", "message"),
    [
        ([forward_of([1, 2, 3], STALE)], "no forward of these rows has been computed before"),
        ([forward_of([1, 2, 3], ALL), forward_of([1, 2], STALE)], "no forward of these rows"),
        ([forward_of([1, 2, 3], FeatureReuse(4))], "does not fit a forward of 3 rows"),
        ([forward_of([1, 2, 3], FeatureReuse(2, transfer_ratio=1.5))], "does not fit a forward of 3 rows"),
        ([replace(forward_of([1, 2, 3], ALL), attention=causal(3))], "by a whole text with full attention"),
        (
            [forward_of([1, 2, 3], None), replace(forward_of([1, 2, 3], ALL), commit=Commit([0]))],
            "1 cached rows",
        ),
    ],
)
def test_a_forward_that_cannot_reuse_features_is_refused(forwards, message):
    engine = random_engine()
    for _ in range(2):  # nothing of one request is left for the next
        with pytest.raises(DecodeError, match=message):
            engine.run(play, [1], Script(forwards))


def test_features_end_with_their_request():
    engine = random_engine()
    first, second = [forward_of([1, 2, 3], ALL)], [forward_of([1, 2, 3], STALE)]
    engine.run(play, [1], Script(first))
    with pytest.raises(DecodeError, match="no forward of these rows"):
        engine.run(play, [1], Script(second))
    requests = [Request(play, [1], Script(forwards)) for forwards in (first, second, first + second)]
    outs = dict(engine.run_many(requests, 1))
    assert isinstance(outs[1], DecodeError)
    assert outs[2].num_forwards == 2
