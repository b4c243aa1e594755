"""The families of tiny models: what differs between the shipped one and the next one, which is trained on more."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from miniature.arithmetic import draw_gsm8k, draw_math
from miniature.choice import draw_arc_challenge, draw_gpqa, draw_mmlu_pro
from miniature.code import draw_humaneval, draw_mbpp
from miniature.drills import DRILLS
from miniature.item import Draw, DrillDraw
from miniature.longer import drills as longer_drills
from miniature.longer import facts, laws, mathematics, parts, programs, stories
from miniature.systems import System, systems


@dataclass(frozen=True, kw_only=True)
class Course:
    """The rows of training runs.

    Attributes:
        seed: seed of the draws.
        num_items: items of each task.
        num_drills: drill -> number of conversations.
    """

    seed: int
    num_items: int
    num_drills: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of tiny models and what it is trained and measured on.

    Attributes:
        name: the name on command lines.
        draws: benchmark -> the draw of its items.
        drills: name -> the draw of a drill.
        configs: folder of the training configurations, one file for each stage.
        courses: what the backbone and then each fine-tune is trained on; a second one is what each fine-tune is trained
            on after it.
        num_tokenizer_items: items of each task that the tokenizer is trained on.
        vocabulary_size: most ids of the tokenizer, special tokens included.
        gen_length: tokens that a system may write when it is measured; no answer is longer.
        systems: the systems of the frontier with the settings that are tried.
    """

    name: str
    draws: Mapping[str, Draw]
    drills: Mapping[str, DrillDraw]
    configs: Path
    courses: Sequence[Course]
    num_tokenizer_items: int = 3000
    vocabulary_size: int = 2048
    gen_length: int
    systems: tuple[System, ...]


SHIPPED = Family(
    name="shipped",
    draws={
        "mmlu_pro": draw_mmlu_pro,
        "arc_challenge": draw_arc_challenge,
        "gsm8k": draw_gsm8k,
        "math": draw_math,
        "gpqa": draw_gpqa,
        "humaneval": draw_humaneval,
        "mbpp": draw_mbpp,
    },
    drills=DRILLS,
    courses=(Course(seed=2512, num_items=15_000, num_drills=dict.fromkeys(DRILLS, 20_000)),),
    configs=Path(__file__).parent / "configs",
    gen_length=64,
    systems=systems(
        gen_length=64,
        llada_blocks=(8, 32),
        fast_dllm_blocks=(8, 16, 32),
        refusion_blocks={4: (4, 8, 16, 32), 8: (8, 16, 32)},
    ),
)

LONGER = Family(
    name="longer",
    draws={
        "mmlu_pro": facts.draw_mmlu_pro,
        "arc_challenge": facts.draw_arc_challenge,
        "gsm8k": stories.draw_gsm8k,
        "math": mathematics.draw_math,
        "gpqa": laws.draw_gpqa,
        "humaneval": programs.draw_humaneval,
        "mbpp": programs.draw_mbpp,
        "parts": parts.draw_parts,
    },
    drills=longer_drills.DRILLS,
    # The masked objectives are slowest to learn calculations.
    courses=(
        Course(seed=2512, num_items=15_000, num_drills=dict.fromkeys(longer_drills.DRILLS, 20_000)),
        Course(seed=2513, num_items=5000, num_drills={"calculations": 35_000}),
    ),
    configs=Path(__file__).parent / "longer" / "configs",
    gen_length=96,
    systems=systems(
        gen_length=96,
        llada_blocks=(8, 32, 96),
        fast_dllm_blocks=(8, 32, 96),
        refusion_blocks={4: (4, 16, 32, 96), 8: (8, 16, 32, 96), 16: (16, 32, 96)},
    ),
)

FAMILIES: Mapping[str, Family] = {family.name: family for family in (SHIPPED, LONGER)}
