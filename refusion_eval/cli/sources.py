"""Facts that a report needs beside the records: questions and gold answers of the rows, words of the tokenizers."""

import functools
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from refusion_eval.benchmarks import Row, Task, find_task, is_sealed
from refusion_eval.benchmarks.rows import Turns
from refusion_eval.errors import RefusionEvalError
from refusion_eval.report.collect import Asked
from refusion_eval.report.replay import Spell
from refusion_eval.runs.job import prompt_hash
from refusion_eval.scoring.rescore import recorded_system, rows_by_hash
from refusion_eval.store.records import Sample
from refusion_eval.store.run_store import Run

if TYPE_CHECKING:
    from refusion_eval.runs.system import System

log = logging.getLogger(__name__)

AS_SENT = "As it was sent, chat template included: its hash is the recorded one."
TURN_ONLY = "The user's turn as this version words it. What was sent had another wording, template or examples."


class FoundSources:
    """Loads rows and tokenizers when a report asks for them, each once; the log says so if one cannot be loaded."""

    def __init__(self, data_dir: Path | None) -> None:
        self._data_dir = data_dir
        self._rows_of = functools.cache(self._load_rows)
        self._systems: dict[str, System | None] = {}

    def asked(self, run: Run, sample: Sample) -> Asked:
        task = find_task(sample.key.task)
        rows = self._rows_of(task)
        if task is None or rows is None:
            return Asked(None, None, "The benchmark's rows are not at hand: name their folder with --data.")
        row = rows.get(sample.key.doc_hash)
        if row is None:
            return Asked(None, None, "The recorded document is not among the benchmark's rows here.")
        gold = task.benchmark.gold(row)
        if is_sealed(sample.key.task, sample.benchmark):
            return Asked(None, gold)
        turns = task.benchmark.turns(row)
        texts = (text for text in self._wordings(run, turns) if prompt_hash(text) == sample.key.prompt_hash)
        as_sent = next(texts, None)
        return Asked(turns.user, gold, TURN_ONLY) if as_sent is None else Asked(as_sent, gold, AS_SENT)

    def spell(self, run: Run) -> Spell | None:
        system = self._system(run)
        return None if system is None else system.backend.detokenizer.spelled

    def _wordings(self, run: Run, turns: Turns) -> Iterator[str]:
        """The prompts that these turns may have been sent as; the chat template, which loads slowly, comes last."""
        yield turns.user
        if system := self._system(run):
            yield system.render_turns(turns)

    def _load_rows(self, task: Task | None) -> Mapping[str, Row] | None:
        if task is None:
            return None
        try:
            return rows_by_hash(task, self._data_dir)
        except RefusionEvalError as problem:
            log.warning("%s is shown without questions and right answers: %s", task.benchmark.name, problem)
            return None

    def _system(self, run: Run) -> "System | None":
        if run.run_id not in self._systems:
            self._systems[run.run_id] = None
            try:
                system = recorded_system(run)
                _ = system.backend.detokenizer  # loads the tokenizer, or says why it cannot
                self._systems[run.run_id] = system
            except RefusionEvalError as problem:
                log.warning("%s is shown with token numbers instead of words: %s", run.run_id, problem)
        return self._systems[run.run_id]
