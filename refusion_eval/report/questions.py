"""The questions of a page: each is stored once, whole for the view of a sample and shortened for the lists."""

import os
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from refusion_eval.report.assemble import ChunkWriter
from refusion_eval.report.replay import Spell
from refusion_eval.store.records import Sample
from refusion_eval.store.run_store import Run

_LONGEST_QUESTION, _LONGEST_GOLD = 140, 48  # characters of a list


class Asked(NamedTuple):
    """The question of a sample."""

    prompt: str | None
    gold: str | None
    note: str = ""


class Sources(Protocol):
    """Finds what records do not hold: questions, right answers and tokenizers."""

    def asked(self, run: Run, sample: Sample) -> Asked:
        """The question of a sample. The prompt of a sealed task is never shown."""

    def num_items(self, run: Run, task: str, benchmark: str) -> int | None:
        """Number of items of the whole task, None if it is not known."""

    def spell(self, run: Run) -> Spell | None:
        """Gives the text of token ids of the run, None if its tokenizer is not at hand."""


# Chunk and index of a question there, and its number in the list of its task.
Place = tuple[tuple[str, int], int]


@dataclass(slots=True)
class _TaskQuestions:
    """The questions of a task; `shared` is what all prompts begin with, an instruction or the chat template."""

    shared: str | None = None
    prompts: list[str] = field(default_factory=list)
    golds: list[str] = field(default_factory=list)

    def add(self, prompt: str, gold: str) -> int:
        if self.shared is None:
            self.shared = prompt
        self.shared = os.path.commonprefix([self.shared, prompt])  # noqa: RUF071, of characters and not of folders
        # The shared part only gets shorter, so the shown part of the prompt is within what is kept.
        self.prompts.append(prompt[: len(self.shared) + _LONGEST_QUESTION])
        self.golds.append(_short(gold, _LONGEST_GOLD))
        return len(self.golds) - 1

    def as_list(self) -> dict[str, list[str]]:
        start = (self.shared or "").rfind("\n") + 1
        return {"question": [_short(prompt[start:], _LONGEST_QUESTION) for prompt in self.prompts], "gold": self.golds}


def _short(text: str, longest: int) -> str:
    return " ".join(text.split())[:longest]


class Questions:
    """Collects the questions of all runs; one that several runs asked is stored once."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._whole, self._lists = ChunkWriter("q"), ChunkWriter("l")
        self._places: dict[tuple[str, str, str], Place] = {}
        self._tasks: dict[str, _TaskQuestions] = {}

    def add(self, run: Run, sample: Sample, sealed: bool) -> Place:
        """The place of a sample's question, which is left out if the task is sealed."""
        identity = (sample.key.task, sample.key.doc_hash, sample.key.prompt_hash)
        if identity not in self._places:
            asked = self._sources.asked(run, sample)
            if sealed:
                asked = Asked(None, asked.gold)
            of_task = self._tasks.setdefault(sample.key.task, _TaskQuestions())
            number = of_task.add(asked.prompt or "", asked.gold or "")
            self._places[identity] = self._whole.add(asked._asdict()), number
        return self._places[identity]

    def finish(self) -> tuple[dict[str, str], dict[str, str]]:
        """All chunks, and the name of the chunk with the list of each task."""
        names = {}
        for task, questions in self._tasks.items():
            names[task], _ = self._lists.add(questions.as_list())
            self._lists.flush()
        self._whole.flush()
        return self._whole.chunks | self._lists.chunks, names
