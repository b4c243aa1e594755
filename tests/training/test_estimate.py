"""What a check says of FLOPs, tokens and time, beside figures by hand."""

import json
from pathlib import Path

import pytest

from refusion_eval.training.config import RunConfig, read_run_config
from refusion_eval.training.estimate import estimate, step_cost


def config(folder: Path, *overrides: str) -> RunConfig:
    """The tiny configuration with two equal rows, for next tokens of the answer."""
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps({"query": "A", "response": "B"}) + "\n" + json.dumps({"query": "A", "response": "B"}))
    settings = ["objective.objective=sft", "objective.eos_multiple=0", f"data.files=[{rows}]", *overrides]
    return read_run_config("tiny", settings)


def test_flops_and_tokens_of_a_step_are_those_by_hand(tmp_path: Path) -> None:
    cost = step_cost(config(tmp_path))
    assert cost is not None
    # Two layers of width 32, an MLP of 64, two query heads of 16, one key-value head, a tied head of 1,837 rows. The
    # last token of a sample is computed, though it has no label; of the answer "B" and its EOS both are labels.
    attention, mlp, head = 32 * (32 + 16 + 16) + 32 * 32, 3 * 32 * 64, 32 * 1837
    rows, labels = cost.tokens / 16, 2
    pairs = rows * (rows + 1) / 2
    by_hand = 6 * rows * (2 * attention + mlp) + 6 * labels * (mlp + head) + 12 * 2 * 2 * 16 * pairs
    assert cost.flops == pytest.approx(16 * by_hand)
    assert cost.num_samples == 2


def test_the_check_states_the_run_and_an_estimate_of_its_time(tmp_path: Path) -> None:
    run = config(tmp_path)
    cost = step_cost(run)
    assert cost is not None
    words = estimate(run)
    assert f"a step has about {cost.flops / 1e12:,.3g} TFLOP and {cost.tokens:,.0f} tokens" in words
    assert f"12 steps {12 * cost.flops / 1e15:,.3g} PFLOP and {12 * cost.tokens:,.0f} tokens" in words
    low, high = (f"{12 * cost.flops / (989e12 * mfu) / 60:,.2g}" for mfu in (0.4, 0.1))
    assert f"they take {low} to {high} minutes on one H100 at an assumed MFU of 40% to 10%" in words


def test_epochs_have_a_cost_for_each_step_and_long_rows_none(tmp_path: Path) -> None:
    words = estimate(config(tmp_path, "optimisation.max_steps=null", "optimisation.epochs=2"))
    assert "a step takes" in words
    assert "12 steps" not in words
    assert "none of the first rows fits into data.max_length=2" in estimate(config(tmp_path, "data.max_length=2"))
