"""Facts that a report needs beside the records: questions and gold answers of the rows, words of the tokenizers."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from refusion_eval.benchmarks import BENCHMARKS, Row, is_mini, is_sealed
from refusion_eval.errors import RefusionEvalError
from refusion_eval.report.collect import Asked
from refusion_eval.report.replay import Spell
from refusion_eval.runs.job import prompt_hash
from refusion_eval.runs.system import System
from refusion_eval.scoring.rescore import recorded_system, rows_by_hash
from refusion_eval.store.records import Sample
from refusion_eval.store.run_reader import Run

log = logging.getLogger(__name__)

AS_SENT = "As it was sent, chat template included: its hash is the recorded one."
TURN_ONLY = "The user's turn as this version words it. What was sent had another wording, template or examples."


class FoundSources:
    """Loads benchmark rows and tokenizers when a report asks for them, each once.

    If one of them cannot be loaded, the log says so once and the report is made without it.

    Args:
        data_dir: folder with the benchmarks' rows; None for the usual places.
    """

    def __init__(self, data_dir: Path | None) -> None:
        self._data_dir = data_dir
        self._rows: dict[tuple[str, bool], Mapping[str, Row] | None] = {}
        self._systems: dict[str, System | None] = {}

    def asked(self, run: Run, sample: Sample) -> Asked:
        """Returns the question of a sample and its gold answer, if the recorded document is among the rows."""
        rows = self._rows_of(sample.benchmark, is_mini(sample.key.task))
        if rows is None:
            return Asked(None, None, "The benchmark's rows are not at hand: name their folder with --data.")
        row = rows.get(sample.key.doc_hash)
        if row is None:
            return Asked(None, None, "The recorded document is not among the benchmark's rows here.")
        benchmark = BENCHMARKS[sample.benchmark]
        if is_sealed(sample.key.task, sample.benchmark):
            return Asked(None, benchmark.gold(row))
        turn = benchmark.prompt(row)
        sent = self._rendered(run, turn)
        for text in filter(None, (sent, turn)):
            if prompt_hash(text) == sample.key.prompt_hash:
                return Asked(text, benchmark.gold(row), AS_SENT)
        return Asked(turn, benchmark.gold(row), TURN_ONLY)

    def num_items(self, run: Run, task: str, benchmark: str) -> int | None:
        """Returns the number of items of the whole benchmark; None if its rows cannot be loaded."""
        rows = self._rows_of(benchmark, is_mini(task))
        return None if rows is None else len(rows)

    def spell(self, run: Run) -> Spell | None:
        """Returns the function that spells tokens of the run; None if its tokenizer cannot be loaded."""
        system = self._system(run)
        return None if system is None else system.detokenizer.spelled

    def _rows_of(self, benchmark: str, mini: bool) -> Mapping[str, Row] | None:
        if benchmark not in BENCHMARKS:
            return None
        if (benchmark, mini) not in self._rows:
            self._rows[benchmark, mini] = None
            try:
                self._rows[benchmark, mini] = rows_by_hash(benchmark, mini, self._data_dir)
            except RefusionEvalError as problem:
                log.warning("%s is shown without questions and right answers: %s", benchmark, problem)
        return self._rows[benchmark, mini]

    def _system(self, run: Run) -> System | None:
        if run.run_id not in self._systems:
            self._systems[run.run_id] = None
            try:
                system = recorded_system(run)
                _ = system.detokenizer  # loads the tokenizer, or says why it cannot
                self._systems[run.run_id] = system
            except RefusionEvalError as problem:
                log.warning("%s is shown with token numbers instead of words: %s", run.run_id, problem)
        return self._systems[run.run_id]

    def _rendered(self, run: Run, turn: str) -> str | None:
        system = self._system(run)
        if system is None or not system.model.tokenizer.inner.chat_template:
            return None
        settings: Mapping[str, Any] = run.manifest.settings
        thinking = settings.get("enable_thinking")
        messages = [{"role": "user", "content": turn}]
        return system.model.tokenizer.render_chat(messages, enable_thinking=thinking)
