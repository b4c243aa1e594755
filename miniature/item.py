"""What one synthetic item is, and the rule that keeps training and test items apart."""

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HELD_OUT_SHARE = 8  # one key in eight belongs to the test split


@dataclass(frozen=True, kw_only=True)
class Item:
    """One synthetic question with a gold response.

    Attributes:
        held_out: whether it belongs to the test split: a function of what makes the item this item (kind and numbers,
            or fact and phrasing), not of names, distractors or order, so no test item is in training in any disguise.
        row: the item in the hub dataset's columns, without its id.
        prompt_row: the form that `Prompts.user` reads; the same as `row` except for gpqa, where the choices are
            already shuffled.
        response: a short worked solution ending in the form the prompt asks for.
    """

    held_out: bool
    row: Mapping[str, Any]
    prompt_row: Mapping[str, Any]
    response: str


Draw = Callable[[random.Random, Sequence[int]], Item]  # of one of these grades of difficulty
DrillDraw = Callable[[random.Random], tuple[str, str]]  # (query, response) of a training-only conversation


def key_is_held_out(key: str) -> bool:
    """Whether calculations and programs with this key (kind and numbers) belong to the test split, by a fixed hash."""
    return hashlib.sha256(key.encode()).digest()[0] % HELD_OUT_SHARE == 0
