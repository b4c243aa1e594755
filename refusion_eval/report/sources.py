"""What records do not hold and a report needs: questions, right answers and tokenizers."""

from dataclasses import dataclass
from typing import Protocol

from refusion_eval.report.pieces import Spell
from refusion_eval.store.records import Sample
from refusion_eval.store.run_reader import Run


@dataclass(frozen=True, slots=True)
class Asked:
    """The question of a sample.

    Attributes:
        prompt: text of the prompt, None if it is not at hand.
        gold: the right answer, None if it is not at hand.
        note: what a reader of the prompt must know, or why there is no prompt.
    """

    prompt: str | None
    gold: str | None
    note: str = ""


class Sources(Protocol):
    """Finds what the records do not hold."""

    def asked(self, run: Run, sample: Sample) -> Asked:
        """The question of a sample. The prompt of a sealed task is never shown."""
        ...

    def num_items(self, run: Run, task: str, benchmark: str) -> int | None:
        """Number of items of the whole task, None if it is not known."""
        ...

    def spell(self, run: Run) -> Spell | None:
        """Gives the text of token ids of the run, None if its tokenizer is not at hand."""
        ...
