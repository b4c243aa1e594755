"""Letters with and without reasoning (`miniature.letters`)."""

from dataclasses import replace

import pytest

from miniature import letters
from miniature.family import EMBEDDED
from miniature.letters import measured, num_right_at_once
from miniature.measure import draws
from refusion_eval import api
from refusion_eval.benchmarks import BENCHMARKS


@pytest.fixture(scope="module")
def model() -> api.LoadedModel:
    return api.load_model("embedded:autoregressive_sft")


def test_the_answer_begins_with_the_last_sentence_up_to_the_letter(
    model: api.LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[int]] = []
    decode = api.generate_many

    def noted(given: api.LoadedModel, prompts: list[list[int]], *others: object, **settings: object) -> object:
        asked.extend(prompts)
        return decode(given, prompts, *others, **settings)

    monkeypatch.setattr(letters.api, "generate_many", noted)
    benchmark, chosen = BENCHMARKS["arc_challenge"], draws(EMBEDDED, "arc_challenge", 20)
    found = num_right_at_once(model, "autoregressive", benchmark, chosen)
    ends = {model.tokenizer.decode(prompt).rpartition("The answer")[2] for prompt in asked}
    assert ends <= {" is", " is ("}  # where a token holds the bracket and the letter, it is the letter's
    assert 0 < found <= 20


def test_each_system_has_both_rows_of_each_choice_task() -> None:
    family = replace(EMBEDDED, systems=tuple(one for one in EMBEDDED.systems if one.name == "AR-SFT"))
    rows = measured(family, "embedded:", 10)
    assert rows[["system", "task", "reasoning"]].values.tolist() == [
        ["AR-SFT", task, reasoning] for task in ("mmlu_pro", "arc_challenge", "gpqa") for reasoning in ("yes", "no")
    ]
    assert ((rows.low <= rows.accuracy + 1e-9) & (rows.accuracy <= rows.high + 1e-9)).all()
