"""The embedded family of tiny models: what it is trained and measured on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from miniature import facts, laws, mathematics, parts, programs, stories
from miniature.drills import DRILLS
from miniature.gaps import GAPS
from miniature.item import Draw, DrillDraw, Item
from miniature.steps import GRADES, HARDEST_GRADE
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
        draws: benchmark -> the draw of its items.
        drills: name -> the draw of a drill.
        configs: folder of the training configurations, one file for each stage.
        courses: what the backbone and then each fine-tune is trained on, and what a fine-tune is trained on after it.
        num_tokenizer_items: items of each task that the tokenizer is trained on.
        vocabulary_size: most ids of the tokenizer, special tokens included.
        gen_length: tokens that a system may write when it is measured; no answer is longer.
        systems: the systems of the frontier with the settings that are tried.
        test_grades: grades of the items that systems are measured on; those of training are `GRADES`.
    """

    draws: Mapping[str, Draw]
    drills: Mapping[str, DrillDraw]
    configs: Path
    courses: tuple[Course, ...]
    num_tokenizer_items: int = 3000
    vocabulary_size: int = 2048
    gen_length: int
    systems: tuple[System, ...]
    test_grades: tuple[int, ...] = GRADES


EMBEDDED = Family(
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
    drills=DRILLS,
    # The masked objectives are slowest to learn calculations.
    courses=(
        Course(seed=2512, num_items=15_000, num_drills=dict.fromkeys(DRILLS, 20_000)),
        Course(seed=2513, num_items=5000, num_drills={"calculations": 35_000}),
        Course(seed=2514, num_items=5000, num_drills={"calculations": 35_000}),
        Course(seed=2515, num_items=5000, num_drills={"calculations": 35_000}),
    ),
    configs=Path(__file__).parent / "configs",
    gen_length=96,
    test_grades=(*GRADES, HARDEST_GRADE),
    systems=systems(
        gen_length=96,
        bd3lm_blocks=(4, 8, 16),
        llada_blocks=(8, 32),
        fast_dllm_blocks=(8, 16, 32),
        wedlm_windows=(4, 8, 16),
        refusion_blocks={4: (4, 16, 32, 96), 8: (8, 16, 32, 96), 16: (16, 32, 96)},
    ),
)


def _with_calculations(draw: Callable[..., Item]) -> Draw:
    """The draw of programs of the grades of training whose constants have to be calculated."""
    return lambda rng, grades: draw(rng, [grade for grade in grades if grade in GRADES], is_calculated=True)


# What six systems see last in `miniature.equal_start`: programs that tell a better model from a worse one, where all
# systems have written those of the courses before with the same few mistakes, and texts for infilling.
EQUAL_START = replace(
    EMBEDDED,
    draws={
        **EMBEDDED.draws,
        "humaneval": _with_calculations(programs.draw_humaneval),
        "mbpp": _with_calculations(programs.draw_mbpp),
    },
    drills={**DRILLS, **GAPS},
    courses=(Course(seed=2516, num_items=5000, num_drills={"calculations": 23_000, **dict.fromkeys(GAPS, 4000)}),),
)

# The embedded family, measured on the grades of training only: what a model has learned, without what goes beyond it.
TRAINED_GRADES = replace(EMBEDDED, test_grades=GRADES)
