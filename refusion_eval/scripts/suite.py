"""Evaluates one or several systems and writes one table of all: eval.sh and `refusion-eval suite`."""

import re
import sys
import tomllib
from argparse import ArgumentTypeError
from collections.abc import Iterator, Sequence
from pathlib import Path

from refusion_eval.benchmarks import OURS, RELEASE
from refusion_eval.paths import embedded_systems, tasks_path
from refusion_eval.scripts.artefacts import EMBEDDED, PUBLISHED, PUBLISHED_BASELINE, UNFUSED, Artefacts
from refusion_eval.scripts.steps import EXIT_INCOMPLETE, Parser, Steps, base_name, whole_number

DESCRIPTION = """Without options: the tiny embedded models on the eight mini tasks, on any machine, in minutes.
With --model: that checkpoint on the real benchmarks, with the prompts of ReFusion's release.
Run again to continue an interrupted run."""

# The settings table of autoregressive systems beside the paper's: responses of Qwen3-8B there have up to 810 tokens on
# average, and the length of the others, 512, would cut many of them short.
LONG_RESPONSES = "paper_implied"

# Systems take turns in so many rounds: enough for an interval, and checkpoints are not loaded too often.
DEFAULT_ROUNDS = 3

# Names in messages of the run that the artefacts are about, and of the run that speed-ups are relative to.
REFUSION, BASELINE = "refusion", "the baseline"
FAILED = {BASELINE: "the baseline failed, so the table has no speed-up"}


def main(arguments: Sequence[str]) -> int:
    """Checks the options and runs the suite.

    Raises:
        SystemExit: an option is wrong (status 2), a step failed that the rest needs, or a signal arrived.
    """
    parser = suite_parser(arguments)
    suite = Suite(parser)
    if parser.checks_only:
        return 0
    return suite.check_gpu() if suite.given.gpu_check else suite.run()


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
    add(
        "--tasks",
        metavar="T",
        type=parser.tasks,
        help="benchmarks, tasks of lm-eval (lm_eval:NAME) and YAML files of tasks, separated by commas (default: "
        f"{tasks})",
    )
    add("--include-path", metavar="DIR", type=parser.folder, help="task files of lm-eval, which --tasks may name")
    add("--limit", metavar="N", type=whole_number("above 0", 1), help="only the first N items of each task")
    add("--data", metavar="DIR", type=parser.folder, help="benchmark rows, DIR/<benchmark>/<split>.jsonl[.gz]")
    add(
        "--results",
        metavar="DIR",
        type=parser.path,
        help="folder for runs, tables and pages (default: results, with tables in results/local, which git ignores)",
    )
    add(
        "--no-cuda-graphs",
        action="store_true",
        help="on a GPU: compute every forward anew instead of replaying recordings",
    )
    add(
        "--gpu-check",
        action="store_true",
        help="instead of an evaluation: check tokens, kernels, memory and speed on this machine's GPU, in RESULTS/gpu",
    )
    add(
        "--prompts",
        metavar="P",
        type=_prompts,
        help=f"{RELEASE}: those of ReFusion's release, as for real checkpoints by default; {OURS}: this project's",
    )
    add("--sandbox", metavar="S", type=_sandbox, help="auto, or none to run model-written code without isolation")
    add(
        "--artefacts",
        action="store_true",
        help="also make every table and figure of the paper that these systems support, in RESULTS/<model>/artefacts, "
        "and a page of all samples, RESULTS/reports/<model>.html; for the embedded family this takes about 40 minutes",
    )
    add(
        "--rounds",
        metavar="N",
        type=whole_number("above 0", 1),
        help=f"systems take turns in N rounds over the items, so that their speeds compare (default: {DEFAULT_ROUNDS})",
    )
    add(
        "--fused",
        action="store_true",
        help="also run ReFusion with fused forwards, in rows of its own beside the paper's algorithm; the embedded "
        "models always do",
    )
    return parser


def _sandbox(text: str) -> str:
    if text not in ("auto", "none"):
        raise ArgumentTypeError(f" is '{text}', it must be auto or none")
    return text


def _prompts(text: str) -> str:
    if text not in (OURS, RELEASE):
        raise ArgumentTypeError(f" is '{text}', it must be {OURS} or {RELEASE}")
    return text


class Suite:
    """The systems to run, in order, and what was run so far.

    Raises:
        SystemExit: options do not fit each other.
    """

    def __init__(self, parser: Parser) -> None:
        self.given = given = parser.read()
        self._parser = parser
        self._steps = Steps(dry_run=given.dry_run)
        self._rows = tomllib.loads((tasks_path() / "settings" / "systems.toml").read_text(encoding="utf-8"))
        self.model, self.baseline, self._systems = given.model, given.baseline, given.system
        self.results = given.results or "results"
        # The tables that a clone comes with stay as they are.
        self.tables = given.results or "results/local"
        self.names: list[str] = []
        if given.artefacts and not self.model and not self._systems:
            self._systems = "all"
        if self._systems:
            self._choose_systems()
        elif given.preset or given.adapter or self.model == PUBLISHED:
            parser.error("--preset, --adapter and --model published need --system")
        else:
            self.model = self.model or EMBEDDED
            default = EMBEDDED if self.model == EMBEDDED else PUBLISHED_BASELINE
            self.baseline = "" if given.no_baseline else self.baseline or default
        self.prompts = given.prompts or (OURS if self.model == EMBEDDED else RELEASE)
        if self.model == EMBEDDED and self.prompts == RELEASE:
            parser.error(f"--prompts {RELEASE} is for real benchmarks: --model embedded runs the mini tasks")
        self.runs = f"{self.results}/runs" if self.prompts == OURS else f"{self.results}/runs/{self.prompts}"
        if given.artefacts and self._systems and "refusion" not in self.names:
            parser.error("--artefacts is about ReFusion: name refusion among --system, or leave --system out")
        self.refusion_run = ""
        self.run_dirs: list[str] = []
        self.status = 0

    def run(self) -> int:
        """Runs all systems, writes the table and makes the artefacts; returns the exit status."""
        default_baseline = self.baseline == EMBEDDED and not self.given.baseline
        if self.baseline and not default_baseline:
            self._check_checkpoints()
        systems = list(self._runs())
        if self.baseline:
            run_dir = f"{self.runs}/{base_name(self.baseline)}-autoregressive"
            of_real = [] if default_baseline else self.real_autoregressive
            systems.append((BASELINE, run_dir, ["--model", self.baseline, "--decoder", "autoregressive", *of_real]))
        self._run_in_turn(systems)
        if not self.run_dirs:
            raise SystemExit(self.status)
        preset = f"-{self.given.preset}" if self.given.preset else ""
        name = f"{self._systems.replace(',', '+')}{preset}" if self._systems else base_name(self.model)
        self.write_table(f"{self.tables}/{name}")
        if self.given.artefacts:
            Artefacts(self).make()
        return self.status

    def _run_in_turn(self, systems: Sequence[tuple[str, str, list[str]]]) -> None:
        """Runs systems, given by name, folder and arguments, in alternating rounds; one that failed is left out."""
        wanted = int(self.given.rounds or DEFAULT_ROUNDS) if len(systems) > 1 else 1
        rounds = min(wanted, int(self.given.limit or wanted))
        failed: set[str] = set()
        for number in range(1, rounds + 1):
            for name, run_dir, arguments in systems:
                if run_dir in failed:
                    continue
                status = self.evaluate(run_dir, *arguments, "--round", f"{number}/{rounds}")
                if not self._systems and name == REFUSION:
                    self._need(status)
                self.go_on_without(status, FAILED.get(name, f"{name} failed"))
                if status:
                    failed.add(run_dir)
                elif name == REFUSION:
                    self.refusion_run = run_dir

    def check_gpu(self) -> int:
        """Checks the GPU of this machine; returns the exit status."""
        return self._steps.run(self._parser.python, "-m", "refusion_eval", "gpu-check", "--out", f"{self.results}/gpu")

    @property
    def reference(self) -> list[str]:
        """Options that name the run which speed-ups are relative to, where one has to be named."""
        # The embedded family has two autoregressive systems; this one is the backbone.
        is_there = f"{self.runs}/embedded-autoregressive" in self.run_dirs
        return ["--baseline", "embedded-autoregressive"] if is_there else []

    @property
    def real_autoregressive(self) -> list[str]:
        """Options of an autoregressive checkpoint beside a real ReFusion: as the paper ran Qwen3-8B."""
        return ["--no-thinking", "--preset", LONG_RESPONSES]

    def options(self, *names: str) -> list[str]:
        """Returns those of these options that the user gave, with their values."""
        values = {name: getattr(self.given, name.replace("-", "_")) for name in names}
        return [word for name, value in values.items() if value for word in (f"--{name}", value)]

    def step(self, *arguments: str) -> int:
        """Runs one command of the package; returns 0 if it finished, even with failed samples, else its status."""
        status = self._steps.run(self._parser.python, "-m", "refusion_eval", *arguments)
        if status == EXIT_INCOMPLETE:
            self.status = status
            return 0
        return status

    def pretrained(self, system: str) -> str:
        """Returns the published checkpoint of a system."""
        return str(self._rows[system]["pretrained"])

    def make_folder(self, folder: str) -> None:
        """Makes a folder with its parents."""
        self._need(self._steps.run("mkdir", "-p", folder))

    def evaluate(self, run_dir: str, *arguments: str, tasks: str | None = None) -> int:
        """Runs one system for the table."""
        tasks = self.given.tasks if tasks is None else tasks
        chosen = [] if self.prompts == OURS else ["--prompts", self.prompts]
        chosen += ["--tasks", tasks] if tasks else []
        chosen += ["--no-cuda-graphs"] if self.given.no_cuda_graphs else []
        status = self.step(
            "run", "--run-dir", run_dir, *arguments, *chosen, *self.options("include-path", "limit", "data", "sandbox")
        )
        if not status and run_dir not in self.run_dirs:
            self.run_dirs.append(run_dir)
        return status

    def go_on_without(self, status: int, what: str) -> None:
        """Remembers a failure and goes on, because what is there is worth its table. An interruption ends the suite."""
        if not status:
            return
        if status >= 128:
            raise SystemExit(status)
        self.status = status
        self._say(f"{what}; run the same command again to continue it")

    def write_table(self, folder: str) -> None:
        """Writes the table of all runs so far."""
        self.make_folder(folder)
        files = ("--csv", f"{folder}/results.csv", "--markdown", f"{folder}/table.md")
        self._need(self.step("table", *self.run_dirs, *files, *self.reference))

    def _say(self, text: str) -> None:
        print(f"{self._parser.script or 'suite'}: {text}", file=sys.stderr, flush=True)

    def _need(self, status: int) -> None:
        if status:
            raise SystemExit(status)

    def _choose_systems(self) -> None:
        """Sets the names of the systems, and the model if none is given."""
        parser, given = self._parser, self.given
        if self._systems == "all" and self.model in ("", EMBEDDED):
            self.names, self.model = list(embedded_systems()), EMBEDDED
        elif self._systems == "all":
            self.names = [name for name, row in self._rows.items() if "pretrained" in row]
        else:
            self.names = self._systems.split(",")
        self.model = self.model or PUBLISHED
        for name in self.names:
            if self.model == EMBEDDED and name not in embedded_systems():
                parser.error(f"--model embedded: there is no embedded checkpoint of '{name}'")
            if self.model != EMBEDDED and not self._decoder_of(name):
                parser.error(f"--system: there is no system '{name}'; tasks/settings/systems.toml lists them")
        if self.model in (EMBEDDED, PUBLISHED):
            if given.adapter:
                parser.error("--adapter needs --model with its checkpoint")
        elif len(self.names) != 1:
            parser.error(f"--model {self.model} is one checkpoint, and --system names {len(self.names)} systems")
        if given.preset and not (
            self.model != EMBEDDED and any(self._has_preset(name, given.preset) for name in self.names)
        ):
            parser.error(f"--preset: no settings table of these systems is called '{given.preset}'")

    def _decoder_of(self, system: str) -> str:
        """Returns the decoder of a system; a decoder without a row is a system too; empty if there is neither."""
        if system in self._rows:
            return self._rows[system]["decoder"]
        file = Path(__file__).parents[1] / "decoders" / f"{system}.py"
        return system if re.fullmatch(r"\w+", system) and file.is_file() else ""

    def _has_preset(self, system: str, preset: str) -> bool:
        """Whether the decoder of a system has a settings table of that name."""
        # The tables are YAML, which the standard library does not read; the run itself checks them in full.
        table = tasks_path() / "settings" / f"{self._decoder_of(system)}.yaml"
        text = table.read_text(encoding="utf-8") if table.is_file() else ""
        return re.search(rf"^  {re.escape(preset)}:", text, re.MULTILINE) is not None

    def _check_checkpoints(self) -> None:
        """Says within seconds whether model and baseline can run, because the first run may take hours."""
        both = [] if self._systems or self.model == EMBEDDED else [("model", self.model, "refusion")]
        both.append(("baseline", self.baseline, "autoregressive"))
        failed = [name for name, model, decoder in both if self.step("check", "--model", model, "--decoder", decoder)]
        if "model" in failed:
            self._say("name another model with --model")
        if "baseline" in failed:
            self._say("name another baseline with --baseline, or run without one with --no-baseline")
        if failed:
            raise SystemExit(1)

    def _runs(self) -> Iterator[tuple[str, str, list[str]]]:
        """Yields name, folder and arguments of each system's run, the baseline's excepted."""
        runs = self.runs
        if not self._systems:
            arguments = ["--model", self.model, "--decoder", "refusion"]
            yield from self._of_refusion(f"{runs}/{base_name(self.model)}-refusion", arguments)
        for name in self.names:
            if self.model == EMBEDDED:
                checkpoint, decoder = embedded_systems()[name]
                model = EMBEDDED if decoder == checkpoint else f"{EMBEDDED}:{checkpoint}"
                run_dir, arguments = f"{runs}/embedded-{name}", ["--model", model, "--decoder", decoder]
            else:
                run_dir, arguments = self._published_run(name)
            if name == REFUSION:
                yield from self._of_refusion(run_dir, arguments)
            else:
                yield name, run_dir, arguments

    def _of_refusion(self, run_dir: str, arguments: list[str]) -> Iterator[tuple[str, str, list[str]]]:
        """Yields the run of the paper's algorithm, and that with fused forwards where it is wanted.

        Both say so in their folder, because earlier versions fused forwards in the folder without either word.
        """
        yield REFUSION, f"{run_dir}-unfused", [*arguments, *UNFUSED]
        if self.given.fused or self.model == EMBEDDED:
            yield "refusion with fused forwards", f"{run_dir}-fused", [*arguments, "--set", "fuse=true"]

    def _published_run(self, name: str) -> tuple[str, list[str]]:
        """Returns folder and arguments of the run of one published system."""
        arguments, run_dir = ["--system", name], f"{self.runs}/{name}"
        if self.model != PUBLISHED:
            arguments += ["--model", self.model, *self.options("adapter")]
            run_dir = f"{self.runs}/{base_name(self.model)}-{name}"
        preset = self.given.preset or (LONG_RESPONSES if self._decoder_of(name) == "autoregressive" else "")
        if preset and self._has_preset(name, preset):
            arguments += ["--preset", preset]
            run_dir += f"-{preset}"
        elif preset:
            self._say(f"{name} has no settings table '{preset}' and runs with its own")
        return run_dir, arguments


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
