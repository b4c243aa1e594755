"""What the records leave out, and whoever makes a report finds elsewhere: questions, right answers, tokenizers."""

from dataclasses import dataclass
from typing import Protocol

from refusion_eval.report.pieces import Spell
from refusion_eval.store.records import Sample
from refusion_eval.store.run_reader import Run


@dataclass(frozen=True, slots=True)
class Asked:
    """What a sample was asked.

    Attributes:
        prompt: the text, None if it is not at hand.
        gold: the right answer, None likewise.
        note: what a reader of the prompt must know, or why there is none.
    """

    prompt: str | None
    gold: str | None
    note: str = ""


class Sources(Protocol):
    """Finds what the records leave out."""

    def asked(self, run: Run, sample: Sample) -> Asked:
        """What a sample was asked. Of a sealed task the prompt is never wanted."""
        ...

    def num_items(self, run: Run, task: str, benchmark: str) -> int | None:
        """Items of a whole task, None if not known."""
        ...

    def spell(self, run: Run) -> Spell | None:
        """Spells token ids of a run, None if its tokenizer is not at hand."""
        ...
