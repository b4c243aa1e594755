"""What is trained is what is decoded: losses of objectives with masks against the engine and against the decoders."""

from collections.abc import Callable, Iterator, Sequence
from math import log
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import Qwen3ForCausalLM

from refusion_eval import api
from refusion_eval.decoders import bd3lm, idlm, wedlm
from refusion_eval.models.attention import visible
from refusion_eval.training.data.collate import collate
from refusion_eval.training.objectives.corrupt import causal_example
from refusion_eval.training.objectives.example import IGNORED, Example
from refusion_eval.training.objectives.loss import hybrid_loss
from refusion_eval.training.objectives.masked import (
    Noise,
    bd3lm_example,
    draw,
    idlm_example,
    llada_example,
    wedlm_example,
)
from refusion_eval.types import (
    DROP_ALL,
    NOTHING,
    Commit,
    Decoding,
    Forward,
    Read,
    Response,
    Trace,
    bidirectional,
    block_causal,
)
from tests.decoders.scripted import answer_by_place, readout, run_scripted
from tests.training.test_masked import bd3lm_rows
from tests.training.tiny import MASK, cross_entropies, random_model

BLOCK_SIZE = 4
PROMPT, ANSWER = list(range(1, 8)), list(range(8, 20))


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return random_model(seed=3)


@pytest.fixture(scope="module")
def engine(model: Qwen3ForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """Runs given forwards on the saved model: the cross-entropy of every `Read.given`, forward by forward."""
    directory: Path = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(directory)
    loaded = api.load_model(str(directory), dtype="float32", device="cpu", attention="sdpa")

    def run(forwards: Sequence[Forward]) -> list[list[float]]:
        losses: list[list[float]] = []

        def decode(prompt: Sequence[int], settings: object, trace: Trace) -> Decoding:
            for forward in forwards:
                (answers,) = yield forward
                assert answers.given is not None
                losses.append([-log(probability) for probability in answers.given])
            return Response((), "length")

        loaded.engine.run(decode, PROMPT, SimpleNamespace(num_positions=len(ANSWER)))
        return losses

    return run


def _read(first_row: int, labels: np.ndarray) -> Read:
    (rows,) = np.nonzero(labels != IGNORED)
    return Read((first_row + rows).tolist(), given=labels[rows].tolist())


def test_llada_rows_are_those_of_a_bidirectional_forward(model: Qwen3ForCausalLM, engine: Callable) -> None:
    example = llada_example(PROMPT, ANSWER, draw(np.random.default_rng(1), len(ANSWER), len(ANSWER)), mask=MASK)
    length = len(example.tokens)
    forward = Forward(
        example.tokens.tolist(), list(range(length)), bidirectional(length), (_read(0, example.mdm_labels),)
    )
    trained = list(cross_entropies(model, collate([[example]])).values())
    assert len(trained) > 2
    assert engine([forward])[0] == pytest.approx(trained, rel=1e-4)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("num_prompt", [0, 3, 4, 7])
def test_bd3lm_blocks_are_those_of_forwards_behind_the_clean_text(
    model: Qwen3ForCausalLM, engine: Callable, num_prompt: int, cached: bool
) -> None:
    prompt = PROMPT[:num_prompt]
    noise = draw(np.random.default_rng(num_prompt), len(ANSWER), BLOCK_SIZE)
    example = bd3lm_example(prompt, ANSWER, noise, block_size=BLOCK_SIZE, mask=MASK)
    text, noisy = [*prompt, *ANSWER], np.where(noise.masked, MASK, ANSWER).tolist()
    labels = np.where(noise.masked, ANSWER, IGNORED)
    forwards, num_cached, commit = [], 0, NOTHING
    for first in range(0, len(ANSWER), BLOCK_SIZE):
        start, block = num_prompt + first, slice(first, first + BLOCK_SIZE)
        fed = range(num_cached if cached else 0, start + BLOCK_SIZE)
        tokens = [*text[fed.start : start], *noisy[block]]
        sizes = np.unique([(position - num_prompt) // BLOCK_SIZE for position in fed], return_counts=True)[1]
        read = _read(start - fed.start, labels[block])
        forwards.append(Forward(tokens, fed, block_causal(sizes.tolist()), (read,), commit))
        commit = Commit(range(start - fed.start)) if cached else DROP_ALL
        num_cached = start
    trained = list(cross_entropies(model, collate([[example]])).values())
    assert len(trained) > 2
    assert [loss for some in engine(forwards) for loss in some] == pytest.approx(trained, rel=1e-4)


@pytest.mark.parametrize("num_prompt", [1, 3, 4, 7, 8])
def test_bd3lm_rows_see_what_they_see_in_the_decoder(num_prompt: int) -> None:
    settings = bd3lm.Bd3lmSettings(gen_length=len(ANSWER), block_length=BLOCK_SIZE, mask_id=MASK)
    _, _, forwards = run_scripted(
        bd3lm.decode, [1] * num_prompt, settings, lambda forward, read: readout([5] * len(read.rows), 0.5)
    )
    decoded: dict[tuple[str, int], set[tuple[str, int]]] = {}
    cache: set[tuple[str, int]] = set()
    previous: list[tuple[str, int]] = []
    for forward in forwards:
        cache |= {previous[row] for row in forward.commit.rows}
        num_clean = len(forward.tokens) - BLOCK_SIZE
        rows = [("clean" if row < num_clean else "noisy", at) for row, at in enumerate(forward.positions)]
        for row, sees in zip(rows, visible(forward.attention), strict=True):
            seen = cache | {other for other, is_seen in zip(rows, sees, strict=True) if is_seen}
            assert decoded.setdefault(row, seen) == seen
        previous = rows

    noise = draw(np.random.default_rng(0), len(ANSWER), BLOCK_SIZE)
    example = bd3lm_example([1] * num_prompt, ANSWER, noise, block_size=BLOCK_SIZE, mask=MASK)
    assert example.visibility is not None
    rows = bd3lm_rows(num_prompt, len(ANSWER), BLOCK_SIZE)
    trained = {
        row: {other for other, is_seen in zip(rows, sees, strict=True) if is_seen}
        for row, sees in zip(rows, example.visibility.mask(), strict=True)
    }
    assert decoded == trained


Row = tuple[int, int]  # token and position


def rows_before_masks(forwards: Sequence[Forward]) -> Iterator[tuple[list[Row], list[Row], list[list[Row]]]]:
    """Of each forward with masks: the tokens that are known, the masks, and all rows that each mask sees."""
    cache: list[Row] = []
    previous: list[Row] = []
    for forward in forwards:
        cache = [*cache[: forward.commit.keep], *(previous[row] for row in forward.commit.rows)]
        previous = list(zip(forward.tokens, forward.positions, strict=True))
        masks = [row for row in previous if row[0] == MASK]
        seen = [
            sorted([*cache, *(row for row, is_seen in zip(previous, sees, strict=True) if is_seen)])
            for own, sees in zip(previous, visible(forward.attention), strict=True)
            if own[0] == MASK
        ]
        if masks:
            yield sorted({*cache, *previous} - {*masks}, key=itemgetter(1)), masks, seen


def seen_in_training(example: Example) -> list[list[Row]]:
    """All rows that each labelled mask of an example sees."""
    assert example.visibility is not None
    rows = list(zip(example.tokens.tolist(), example.positions.tolist(), strict=True))
    masks = np.flatnonzero((example.tokens == MASK) & example.visibility.noisy)
    sees = example.visibility.mask()
    return [sorted(rows[row] for row in np.flatnonzero(sees[mask])) for mask in masks]


@pytest.mark.parametrize("size", [2, 4])
def test_masks_of_idlm_see_what_they_see_in_the_decoder(size: int) -> None:
    settings = idlm.IdlmSettings(gen_length=30, gen_block_size=size, mask_id=MASK, temperature=0)
    _, _, forwards = run_scripted(idlm.decode, PROMPT, settings, answer_by_place(MASK))
    found = list(rows_before_masks(forwards))
    assert len(found) > 3
    for known, masks, seen in found:
        text = [token for token, _ in known]
        assert [position for _, position in masks] == list(range(len(text), len(text) + len(masks)))
        example = idlm_example(text, [5] * len(masks), block_size=len(masks), mask=MASK)
        assert seen_in_training(example) == seen
        assert example.mdm_labels[-len(masks) :].tolist() == [5] * (len(masks) - 1) + [IGNORED]  # the next positions


@pytest.mark.parametrize("size", [3, 8])
def test_masks_of_wedlm_see_what_they_see_in_the_decoder(size: int) -> None:
    settings = wedlm.WedlmSettings(gen_length=20, window_size=size, mask_id=MASK)
    _, _, forwards = run_scripted(wedlm.decode, PROMPT, settings, answer_by_place(MASK))
    found = list(rows_before_masks(forwards))
    assert any(known[-1][1] > masks[0][1] for known, masks, _ in found)  # a token is known behind a mask
    for known, masks, seen in found:
        text = {position: token for token, position in [*known, *masks]}
        start, end = masks[0][1], max(text) + 1
        window = [text[position] for position in range(start, end)]
        masked = np.array([token == MASK for token in window])
        noise = Noise(probabilities=np.full(len(window), 0.5), masked=masked)
        example = wedlm_example(
            [text[position] for position in range(start)], window, noise, block_size=len(window), mask=MASK
        )
        assert seen_in_training(example) == seen


@pytest.mark.parametrize("make", [idlm_example, wedlm_example])
def test_the_clean_rows_of_two_streams_are_those_of_autoregressive_training(
    make: Callable[..., Example], model: Qwen3ForCausalLM
) -> None:
    noise = {"noise": draw(np.random.default_rng(0), len(ANSWER), 5)} if make is wedlm_example else {}
    example = make(PROMPT, ANSWER, **noise, block_size=5, mask=MASK)
    alone = causal_example(PROMPT, ANSWER, learn_prompt=False)
    trained, causal = (hybrid_loss(model, collate([[one]])) for one in (example, alone))
    assert float(trained.ar) == pytest.approx(float(causal.ar), rel=1e-5)
    assert float(trained.mdm) > 0
