"""Evaluates one or several systems and writes one table of all: eval.sh and `refusion-eval suite`."""

import os
import re
import sys
import tomllib
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path

from refusion_eval.paths import embedded_decoder, embedded_names, tasks_path
from refusion_eval.scripts.artefacts import PUBLISHED_BASELINE, Artefacts
from refusion_eval.scripts.steps import Parser, Steps, whole_number

DESCRIPTION = """Without options: the tiny embedded models on the seven mini tasks, on any machine, in minutes.
With --model: that checkpoint on the real benchmarks. Run again to continue an interrupted run."""

EMBEDDED, PUBLISHED = "embedded", "published"

# Exit status of a run that finished with failed samples, see `refusion_eval.cli.terminal`.
EXIT_INCOMPLETE = 3


def main(arguments: Sequence[str]) -> int:
    """Checks the options and runs the suite.

    Args:
        arguments: the options, after what a shell script put before them.

    Returns:
        0; EXIT_INCOMPLETE if samples failed; the status of the last run that failed.

    Raises:
        SystemExit: an option is wrong (status 2), a step failed that the rest needs, or a signal arrived.
    """
    parser = suite_parser(arguments)
    suite = Suite(parser, parser.read())
    return 0 if parser.checks_only else suite.run()


def suite_parser(arguments: Sequence[str]) -> Parser:
    """Returns the parser of the suite's options."""
    parser = Parser(arguments, "suite", DESCRIPTION)
    add, text = parser.add_argument, parser.text
    add(
        "--model",
        metavar="M",
        type=parser.checkpoint,
        help="ReFusion checkpoint: hub id or directory, for example GSAI-ML/ReFusion; with --system the checkpoint of "
        "that one system, published (all that have a public checkpoint), or embedded",
    )
    add(
        "--system",
        metavar="S",
        type=text,
        help="systems of the paper by name, separated by commas (refusion-eval systems lists them), as they were "
        "published; or all: the embedded family on the mini tasks",
    )
    add("--preset", metavar="P", type=text, help="with --system: settings table of the decoders, for example official")
    add("--adapter", metavar="A", type=parser.checkpoint, help="with --system and --model: LoRA adapter of the model")
    add(
        "--baseline",
        metavar="B",
        type=parser.checkpoint,
        help=f"autoregressive checkpoint to compare with (default for --model: {PUBLISHED_BASELINE})",
    )
    add("--no-baseline", action="store_true", help="run no baseline; the table then has no speed-up")
    tasks = "mmlu_pro,arc_challenge,gsm8k,math,gpqa,humaneval,mbpp"
    add("--tasks", metavar="T", type=text, help=f"benchmarks, separated by commas (default: {tasks})")
    add("--limit", metavar="N", type=whole_number("above 0", 1), help="only the first N items of each task")
    add("--data", metavar="DIR", type=parser.folder, help="benchmark rows, DIR/<benchmark>/<split>.jsonl[.gz]")
    add("--results", metavar="DIR", type=parser.path, help="folder for the results (default: results)")
    add("--sandbox", metavar="S", type=_sandbox, help="auto, or none to run model-written code without isolation")
    add(
        "--artefacts",
        action="store_true",
        help="also make every table and figure of the paper that these systems support, in RESULTS/<model>/artefacts, "
        "and a page of all samples, RESULTS/reports/<model>.html; of the embedded family within an hour. A real "
        "ReFusion then runs as the paper's algorithm, without fused forwards",
    )
    return parser


class Suite:
    """The systems to run, in order, and what was run so far.

    Args:
        parser: reports wrong options, and knows the interpreter.
        given: the options.

    Raises:
        SystemExit: options do not fit each other.
    """

    def __init__(self, parser: Parser, given: Namespace) -> None:
        self.given, self._parser = given, parser
        self.model, self.baseline, self._systems = given.model, given.baseline, given.system
        self.results = given.results or "results"
        self.names: list[str] = []
        self._rows = tomllib.loads((tasks_path() / "settings" / "systems.toml").read_text(encoding="utf-8"))
        if given.artefacts and not self.model and not self._systems:
            self._systems = "all"
        if self._systems:
            self._check_systems()
        elif given.preset or given.adapter or self.model == PUBLISHED:
            parser.error("--preset, --adapter and --model published need --system")
        if given.artefacts and self._systems and "refusion" not in self.names:
            parser.error("--artefacts is about ReFusion: name refusion among --system, or leave --system out")
        # Figures of a real checkpoint stand beside published ones, so its forwards are those of the paper's algorithm.
        as_in_the_paper = given.artefacts and self.model not in ("", EMBEDDED)
        self.refusion_settings = ["--set", "fuse=false"] if as_in_the_paper else []
        self._refusion_suffix = "-unfused" if as_in_the_paper else ""
        self.refusion_run = ""  # folder of the run of ReFusion that the artefacts are about
        self.run_dirs: list[str] = []
        self.status = 0
        self._steps: Steps

    def run(self) -> int:
        """Runs all systems, writes the table and makes the artefacts; returns the exit status."""
        self._steps = Steps(dry_run=self.given.dry_run)
        if self._systems:
            self._run_systems()
        else:
            self._run_refusion()
        if self.given.artefacts:
            Artefacts(self).make()
        return self.status

    @property
    def reference(self) -> list[str]:
        """Options that name the run which speed-ups are relative to, where one has to be named."""
        # The embedded family has two autoregressive systems; this one is the backbone.
        is_there = f"{self.results}/runs/embedded-autoregressive" in self.run_dirs
        return ["--baseline", "embedded-autoregressive"] if is_there else []

    @property
    def common(self) -> list[str]:
        """Options that every run gets."""
        given = self.given
        pairs = (("--limit", given.limit), ("--data", given.data), ("--sandbox", given.sandbox))
        return [word for option, value in pairs if value for word in (option, value)]

    def step(self, *arguments: str) -> int:
        """Runs one command of the package; returns its exit status."""
        return self._steps.run(self._parser.python, "-m", "refusion_eval", *arguments)

    def make_folder(self, folder: str) -> None:
        """Makes a folder with its parents."""
        self._need(self._steps.run("mkdir", "-p", folder))

    def evaluate(self, run_dir: str, *arguments: str, tasks: str | None = None) -> int:
        """Runs one system for the table.

        Args:
            run_dir: folder of its records.
            arguments: model and decoder.
            tasks: other tasks than the suite's.

        Returns:
            0 if the run finished, though samples may have failed; its exit status if it did not.
        """
        tasks = self.given.tasks if tasks is None else tasks
        chosen = ["--tasks", tasks] if tasks else []
        status = self.step("run", "--run-dir", run_dir, *arguments, *chosen, *self.common)
        if status == EXIT_INCOMPLETE:
            self.status = status
        elif status:
            return status
        self.run_dirs.append(run_dir)
        return 0

    def go_on_without(self, status: int, what: str) -> None:
        """Remembers a failure and goes on: what is there is worth its table. An interruption ends the suite."""
        if not status:
            return
        if status >= 128:
            raise SystemExit(status)
        self.status = status
        self.say(f"{what}; run the same command again to continue it")

    def say(self, text: str) -> None:
        """Prints a line on stderr."""
        print(f"{self._parser.script or 'suite'}: {text}", file=sys.stderr, flush=True)

    def write_table(self, folder: str) -> None:
        """Writes the table of all runs so far."""
        self.make_folder(folder)
        files = ("--csv", f"{folder}/results.csv", "--markdown", f"{folder}/table.md")
        self._need(self.step("table", *self.run_dirs, *files, *self.reference))

    def _need(self, status: int) -> None:
        if status:
            raise SystemExit(status)

    def _check_systems(self) -> None:
        """Sets the names of the systems, and the model if none is given."""
        parser, given = self._parser, self.given
        if self._systems == "all" and self.model in ("", EMBEDDED):
            self.names, self.model = embedded_names(), EMBEDDED
        elif self._systems == "all":
            self.names = [name for name, row in self._rows.items() if "pretrained" in row]
        else:
            self.names = self._systems.split(",")
        self.model = self.model or PUBLISHED
        for name in self.names:
            if self.model == EMBEDDED and name not in embedded_names():
                parser.error(f"--model embedded: there is no embedded checkpoint of '{name}'")
            if self.model != EMBEDDED and not self._decoder_of(name):
                parser.error(f"--system: there is no system '{name}'; tasks/settings/systems.toml lists them")
        if self.model in (EMBEDDED, PUBLISHED):
            if given.adapter:
                parser.error("--adapter needs --model with its checkpoint")
        elif len(self.names) != 1:
            parser.error(f"--model {self.model} is one checkpoint, and --system names {len(self.names)} systems")
        if given.preset and not (self.model != EMBEDDED and any(map(self._has_preset, self.names))):
            parser.error(f"--preset: no settings table of these systems is called '{given.preset}'")

    def _decoder_of(self, system: str) -> str:
        """Returns the decoder of a system; a decoder without a row is a system too; empty if there is neither."""
        if system in self._rows:
            return self._rows[system]["decoder"]
        file = Path(__file__).parents[1] / "decoders" / f"{system}.py"
        return system if re.fullmatch(r"\w+", system) and file.is_file() else ""

    def _has_preset(self, system: str) -> bool:
        """Whether the decoder of a system has a settings table of the preset's name."""
        # The tables are YAML, which the standard library does not read; the run itself checks them in full.
        table = tasks_path() / "settings" / f"{self._decoder_of(system)}.yaml"
        text = table.read_text(encoding="utf-8") if table.is_file() else ""
        return re.search(rf"^  {re.escape(self.given.preset)}:", text, re.MULTILINE) is not None

    def _run_systems(self) -> None:
        if self.baseline:
            self._check_baseline()
        for name in self.names:
            run_dir, arguments = self._system_run(name)
            self.go_on_without(self.evaluate(run_dir, *arguments), f"{name} failed")
            if name == "refusion":
                self.refusion_run = run_dir
        if self.baseline:
            self._run_baseline()
        if not self.run_dirs and not self.given.dry_run:
            raise SystemExit(self.status)
        suffix = f"-{self.given.preset}" if self.given.preset else ""
        self.write_table(f"{self.results}/{self._systems.replace(',', '+')}{suffix}")

    def _system_run(self, name: str) -> tuple[str, list[str]]:
        """Returns the folder and the arguments of one system's run."""
        if self.model == EMBEDDED:
            _use_one_thread()
            decoder = embedded_decoder(name)
            model = EMBEDDED if decoder == name else f"{EMBEDDED}:{name}"
            return f"{self.results}/runs/embedded-{name}", ["--model", model, "--decoder", decoder]
        arguments, run_dir = ["--system", name], f"{self.results}/runs/{name}"
        if self.model != PUBLISHED:
            arguments += ["--model", self.model]
            arguments += ["--adapter", self.given.adapter] if self.given.adapter else []
            run_dir = f"{self.results}/runs/{_base_name(self.model)}-{name}"
        preset = self.given.preset
        if preset and self._has_preset(name):
            arguments += ["--preset", preset]
            run_dir += f"-{preset}"
        elif preset:
            self.say(f"{name} has no settings table '{preset}' and runs with its own")
        if name == "refusion":
            arguments += self.refusion_settings
            run_dir += self._refusion_suffix
        return run_dir, arguments

    def _run_refusion(self) -> None:
        """Runs ReFusion and its autoregressive baseline."""
        model, with_baseline = self.model or EMBEDDED, not self.given.no_baseline
        if model == EMBEDDED:
            _use_one_thread()
        elif with_baseline:
            self.baseline = self.baseline or PUBLISHED_BASELINE
        if with_baseline and self.baseline:
            self._check_baseline()
        self.refusion_run = f"{self.results}/runs/{_base_name(model)}-refusion{self._refusion_suffix}"
        self._need(self.evaluate(self.refusion_run, "--model", model, "--decoder", "refusion", *self.refusion_settings))
        if with_baseline and self.baseline:
            self._run_baseline()
        elif with_baseline:
            run_dir = f"{self.results}/runs/embedded-autoregressive"
            status = self.evaluate(run_dir, "--model", EMBEDDED, "--decoder", "autoregressive")
            self.go_on_without(status, "the baseline failed, so the table has no speed-up")
        self.write_table(f"{self.results}/{_base_name(model)}")

    def _check_baseline(self) -> None:
        """Says within seconds whether the baseline can run: the first run may take hours."""
        status = self.step("check", "--model", self.baseline, "--decoder", "autoregressive")
        if status:
            self.say("name another baseline with --baseline, or run without one with --no-baseline")
            raise SystemExit(1)

    def _run_baseline(self) -> None:
        run_dir = f"{self.results}/runs/{_base_name(self.baseline)}-autoregressive"
        arguments = ("--model", self.baseline, "--decoder", "autoregressive", "--no-thinking")
        self.go_on_without(self.evaluate(run_dir, *arguments), "the baseline failed, so the table has no speed-up")


def _sandbox(text: str) -> str:
    if text not in ("auto", "none"):
        raise ArgumentTypeError(f" is '{text}', it must be auto or none")
    return text


def _base_name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _use_one_thread() -> None:
    """Lets each run use one thread: the embedded models are so small that threads would wait for each other."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
