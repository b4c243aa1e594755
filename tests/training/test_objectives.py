"""The table of objectives and its settings (`refusion_eval.training.objectives.table`)."""

from typing import get_args

import pytest

from refusion_eval.errors import ConfigError
from refusion_eval.training.config import Objective, ObjectiveConfig
from refusion_eval.training.objectives.table import OBJECTIVES


@pytest.mark.parametrize(
    "wrong",
    [
        {"slot_sizes": ()},
        {"slot_sizes": (0,)},
        {"eos_multiple": -1},
        {"block_size": 8},
        {"block_size": 0, "objective": "bd3lm", "eos_multiple": 8},
        {"eos_multiple": 12, "objective": "bd3lm", "block_size": 8},
        {"eos_multiple": 0, "objective": "bd3lm", "block_size": 8},
        {"normalisation": "paper", "objective": "llada"},
        {"normalisation": "paper", "objective": "bd3lm", "eos_multiple": 8, "block_size": 8},
        {"objective": "lladda"},
    ],
)
def test_a_wrong_setting_is_refused_by_name(wrong: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ObjectiveConfig(**{"objective": "sft", **wrong})


def test_an_unknown_objective_is_answered_with_the_known_ones() -> None:
    assert list(OBJECTIVES) == list(get_args(Objective))
    with pytest.raises(ConfigError, match=r"'lladda'; choose one of pretrain, sft, refusion, llada, bd3lm"):
        ObjectiveConfig(objective="lladda")  # type: ignore[arg-type]
