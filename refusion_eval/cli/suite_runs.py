"""The runs of a suite: which systems run, with what options, and their turns."""

import contextlib
import re
import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

from refusion_eval.benchmarks import OURS, PUBLISHED, RELEASE, SUITE_TASKS, SUITES, main_variant
from refusion_eval.cli import EXIT_INCOMPLETE, LOADING, print_value, run_command, say, status_of, told_if_silent
from refusion_eval.cli.parameters import names_of
from refusion_eval.cli.plans import carry_out, model_arguments, plan_of, with_system, words_of
from refusion_eval.config import check_keys, field_types, read_yaml
from refusion_eval.decoders import find_decoder
from refusion_eval.errors import ConfigError
from refusion_eval.evaluation.tracking import check_tracker
from refusion_eval.evaluation.turns import run_in_turns
from refusion_eval.models.packaged import MODELS
from refusion_eval.paths import EMBEDDED, embedded_systems
from refusion_eval.protocol.spec import DEFAULT, read_protocol
from refusion_eval.results.measured import AUTOREGRESSIVE
from refusion_eval.runs.model_args import TO_SERVERS, ModelArgs, server_folder
from refusion_eval.runs.plan import Plan, PlannedRun, Turn, turns
from refusion_eval.runs.settings_tables import check_preset, own_table
from refusion_eval.runs.systems import choose_systems, decoder_of_system, published_systems
from refusion_eval.store.records import SERVER

ALL_PUBLISHED = "published"
PUBLISHED_REFUSION, PUBLISHED_BASELINE = "GSAI-ML/ReFusion", "Qwen/Qwen3-8B"

# The settings table of autoregressive systems beside the paper's: responses of Qwen3-8B there have up to 810 tokens on
# average, and the length of the others, 512, would cut many of them short.
LONG_RESPONSES = "paper_implied"
# An autoregressive checkpoint beside a real ReFusion runs as the paper ran Qwen3-8B.
NO_THINKING = {"thinking": False}
AS_IN_THE_PAPER = {**NO_THINKING, "preset": LONG_RESPONSES}
# The setting of the paper's algorithm: the default, but the folders of runs say so, and so does their record.
UNFUSED = "fuse=false"
# Runs beside that of a system, by the option that asks for them: the system, the end of the folder, and the settings.
BESIDE = {
    "fused": (("refusion", "fused", ["fuse=true"]), ("bd3lm", "merged", ["separate_commit=false"])),
    "verifier": (("refusion", "verifier", [UNFUSED, "completion=verifier"]),),
}

# Names in messages of the run that the artefacts are about, and of the run that speed-ups are relative to.
REFUSION, BASELINE = "refusion", "the baseline"


class Runs(ABC):
    """Runs of several systems, in turns, and their table, in this process."""

    table_folder: str

    def __init__(self, given: SimpleNamespace) -> None:
        check_tracker(getattr(given, "tracker", None))
        self.given = given
        self.run_dirs: list[str] = []
        self.status = 0
        self._planned: list[list[str]] = []  # by --dry-run

    @property
    @abstractmethod
    def reference(self) -> dict[str, str]:
        """Options that name the run which speed-ups are relative to, where one has to be named."""

    @abstractmethod
    def plan(self) -> Plan:
        """The runs and their turns; ConfigError for what cannot run."""

    def run(self) -> None:
        """Makes the runs of the plan and their table."""
        run_in_turns(self.plan(), self._take_turn)
        if not self.run_dirs:
            raise SystemExit(self.status)
        self.write_table(self.table_folder)

    def _take_turn(self, run: PlannedRun, turn: Turn | None) -> bool:
        status = self.take(run, turn)
        self.go_on_without(status, f"{run.name} failed")
        return not status

    @property
    def _progress(self) -> TextIO:
        return sys.stderr if self.given.as_json else sys.stdout  # where only the table belongs

    def values(self, *names: str) -> dict[str, Any]:
        """Those of these options that the user gave."""
        values = {name: getattr(self.given, name, None) for name in names}
        return {name: value for name, value in values.items() if value not in (None, "auto", "")}

    def step(self, command: str, *arguments: str, **options: Any) -> int:
        """Prints and runs one command of the package; returns 0 if it finished, even with failed samples."""
        words = words_of(command, options, arguments)
        # With --json the standard output is that of the table alone.
        shown = sys.stdout if command == "table" else self._progress
        return self._step(words, lambda: run_command(*words), shown)

    def take(self, run: PlannedRun, turn: Turn | None) -> int:
        """Prints and takes one turn of a run, or makes the whole run, as `step` runs a command."""
        of_turn = {} if turn is None else {"turn": turn}
        plan = Plan(runs=(run,), turns=(turn,))

        def evaluate() -> int:
            with told_if_silent(LOADING):
                return status_of("run", lambda: carry_out(plan, with_tables=turn is None))

        status = self._step(words_of("run", {**run.options, **of_turn}), evaluate, self._progress)
        if not status and str(run.run_dir) not in self.run_dirs:
            self.run_dirs.append(str(run.run_dir))
        return status

    def _step(self, words: Sequence[str], make: Callable[[], int], shown: TextIO) -> int:
        plan = self._progress if self.given.dry_run else sys.stderr
        print("+", shlex.join([sys.executable, "-m", "refusion_eval", *words]), flush=True, file=plan)
        if self.given.dry_run:
            self._planned.append(["refusion-eval", *words])
            return 0
        with contextlib.redirect_stdout(shown):
            status = make()
        if status == EXIT_INCOMPLETE:
            self.status = status
            return 0
        return status

    def print_plan(self) -> None:
        """Prints the commands of --dry-run as JSON, if that is asked for."""
        if self.given.dry_run and self.given.as_json:
            print_value([{"command": words} for words in self._planned])

    def go_on_without(self, status: int, what: str) -> None:
        """Remembers a failure and goes on, because what is there is worth its table. An interruption ends the suite."""
        if status >= 128:
            raise SystemExit(status)
        if status:
            self.status = status
            say(f"{what}; run the same command again to continue it")

    def write_table(self, folder: str) -> None:
        files = {"csv": f"{folder}/results.csv", "markdown": f"{folder}/table.md"}
        as_json = {"as_json": True} if self.given.as_json else {}
        if status := self.step("table", *self.run_dirs, **files, **self.reference, **as_json):
            raise SystemExit(status)
        print(
            f"Table: {', '.join(files.values())}", f"Records: {', '.join(self.run_dirs)}", sep="\n", file=self._progress
        )
        page = shlex.join(["refusion-eval", "report", *self.run_dirs, "--out", f"{folder}/report.html"])
        print(f"Next: {page}", file=self._progress)


class Suite(Runs):
    """The systems to run, in order, and what was run so far; raises ConfigError if options do not fit each other."""

    def __init__(self, given: SimpleNamespace) -> None:
        super().__init__(given)
        if given.suite != "paper":
            if given.artefacts:
                raise ConfigError(f"the paper's figures are not about --suite {given.suite}; leave --artefacts out")
            _check_in_suite(names_of(given.tasks), given.suite)
            given.tasks = given.tasks or SUITE_TASKS[given.suite]
        self.model, self.baseline, self._adapter = map(_absolute, (given.model, given.baseline, given.adapter))
        self._systems = given.system or ("all" if given.artefacts and not self.model else "")
        self.results = str(given.results or given.root / "results")
        # The tables that a clone comes with stay as they are.
        self.tables = str(given.results or given.root / "results" / "local")
        self.names: list[str] = []
        self._arguments: dict[str, dict[str, str]] = {}
        if self._systems:
            self._choose_systems()
        elif given.adapter or self.model == ALL_PUBLISHED or (given.preset and not own_table(given.preset)):
            raise ConfigError("a --preset by name, --adapter and --model published need --system")
        else:
            self.model = self.model or EMBEDDED
            # A packaged model is no ReFusion, and so its own baseline.
            self._decoder = AUTOREGRESSIVE if self.model in MODELS else REFUSION
            default = {EMBEDDED: EMBEDDED, **dict.fromkeys(MODELS, "")}.get(self.model, PUBLISHED_BASELINE)
            self.baseline = "" if given.no_baseline else self.baseline or default
            self._check_preset((self._decoder, *([AUTOREGRESSIVE] if self.baseline else [])))
        self.prompts = given.prompts or (OURS if self.model == EMBEDDED else RELEASE)
        if self.model == EMBEDDED and self.prompts == RELEASE:
            raise ConfigError(f"--prompts {RELEASE} is for real benchmarks: --model embedded runs the mini tasks")
        self.runs = f"{self.results}/runs" if self.prompts == OURS else f"{self.results}/runs/{self.prompts}"
        # Runs under other settings are other runs.
        self._set = re.sub(r"[^A-Za-z0-9_.=+-]", "_", "+".join(given.settings or ()))
        self.runs += f"/{self._set}" if self._set else ""
        self._check_options()
        if given.artefacts and REFUSION not in (self.names if self._systems else [self._decoder]):
            raise ConfigError("--artefacts is about ReFusion: name refusion among --system, or leave --system out")
        self.refusion_run = ""
        # A server's address is no part of the name of a table's folder.
        name = "+".join(name.partition(":")[0] for name in names_of(self._systems)) or Path(self.model).name
        self.table_folder = f"{self.tables}/{name}{_suffix(given.preset)}{self._set and f'-{self._set}'}"

    def run(self) -> None:
        if self.baseline and (self.given.baseline or self.baseline != EMBEDDED):
            self._check_checkpoints()
        super().run()

    def plan(self) -> Plan:
        default_baseline, runs = self.baseline == EMBEDDED and not self.given.baseline, list(self._runs())
        if self.baseline:
            own = self._own_table("autoregressive")
            folder = f"{self.runs}/{Path(self.baseline).name}-autoregressive"
            options = {"model": self.baseline, "decoder": "autoregressive", **({} if default_baseline else NO_THINKING)}
            preset = own or ("" if default_baseline else LONG_RESPONSES)
            options |= {"preset": preset} if preset else {}
            runs.append(self.planned(BASELINE, folder + _suffix(own), options))
        self._check_settings(runs)
        rounds = self.given.rounds or (read_protocol(DEFAULT).rounds if len(runs) > 1 else 1)
        return Plan(runs=tuple(runs), turns=turns(rounds, self.given.limit))

    def _take_turn(self, run: PlannedRun, turn: Turn | None) -> bool:
        status = self.take(run, turn)
        if status and not self._systems and run.name == REFUSION:
            raise SystemExit(status)
        self.go_on_without(status, f"{run.name} failed{', so the table has no speed-up' * (run.name == BASELINE)}")
        if not status and run.name == REFUSION:
            self.refusion_run = str(run.run_dir)
        return not status

    @property
    def reference(self) -> dict[str, str]:
        # The embedded family has two autoregressive systems; this one is the backbone.
        is_there = f"{self.runs}/embedded-autoregressive" in self.run_dirs
        return {"baseline": "embedded-autoregressive"} if is_there else {}

    def planned(self, name: str, run_dir: str, options: Mapping[str, Any], tasks: str | None = None) -> PlannedRun:
        """The run of a system by its own options and those of the suite, or with other tasks.

        A setting of the user's goes to the systems whose decoder has it.
        """
        given = self.given
        of_suite: dict[str, Any] = {} if self.model == EMBEDDED else {"prompts": self.prompts}
        of_suite |= self.values("tasks") if tasks is None else {"tasks": tasks}
        of_suite |= {"cuda_graphs": False} if given.no_cuda_graphs else {}
        of_suite |= self.values("include_path", "limit", "samples", "data", "sandbox")
        decoder = with_system(options.get("system"), model_arguments(options))["decoder"]
        of_decoder = field_types(find_decoder(decoder).Settings)
        known = of_decoder.keys() | field_types(ModelArgs).keys()
        of_user = [setting for setting in given.settings or () if setting.partition("=")[0] in known]
        settings = [*options.get("settings", ()), *of_user]
        of_suite |= {"settings": settings} if settings else {}
        of_suite |= self.values("tracker")
        (run,) = plan_of({"run_dir": run_dir, **options, **of_suite}, name).runs
        return run

    def _check_settings(self, runs: Sequence[PlannedRun]) -> None:
        """Raises ConfigError for a setting that no decoder of these runs has."""
        used = {setting for run in runs for setting in run.options.get("settings", ())}
        for setting in self.given.settings or ():
            if setting not in used:
                raise ConfigError(f"--set {setting}: no decoder of this suite has such a setting; correct its name")

    def _choose_systems(self) -> None:
        if self._systems == "all" and self.model in ("", EMBEDDED):
            self.names, self.model = list(embedded_systems()), EMBEDDED
        elif self._systems == "all":
            named = published_systems().items()
            self.names = [name for name, system in named if system.pretrained and not system.serve]
        else:
            self.names = names_of(self._systems)
        self.model = self.model or ALL_PUBLISHED
        decoded_here = [name for name in self.names if not _is_server(name)]
        if chosen := decoded_here or (self.names if self.model != EMBEDDED else []):
            self._arguments = choose_systems(chosen, "" if self.model == ALL_PUBLISHED else self.model)
        if self.model in (EMBEDDED, ALL_PUBLISHED) and self._adapter:
            raise ConfigError("--adapter needs --model with its checkpoint")
        self._check_preset([AUTOREGRESSIVE if _is_server(name) else decoder_of_system(name) for name in self.names])

    def _check_options(self) -> None:
        """Raises ConfigError for an option that no run of this suite would use, or that only some parts would."""
        given = self.given
        servers = list(filter(_is_server, self.names))
        if not servers and (of_servers := self.values(*TO_SERVERS)):
            raise ConfigError(f"--{next(iter(of_servers)).replace('_', '-')} is for --system server")
        if given.server_name and len(servers) > 1:
            raise ConfigError(f"--server-name names one server, and --system has {len(servers)}: {', '.join(servers)}")
        places: dict[str, str] = {}
        for name in (name for name in servers if name not in published_systems()):
            if (other := places.setdefault(server_folder(name.partition(":")[2]), name)) != name:
                raise ConfigError(f"--system: {other} and {name} would share one folder; leave one of them out")
        if given.baseline and given.no_baseline:
            raise ConfigError("--baseline and --no-baseline exclude each other; leave one of them out")
        for option, variants in BESIDE.items():
            systems = dict.fromkeys(system for system, *_ in variants)
            if getattr(given, option) and self.names and not systems.keys() & set(self.names):
                raise ConfigError(f"--{option} is for {' and '.join(systems)}; name it among --system, or leave it out")
        # Sweeps, localities and case studies take their settings from files of their own.
        of_runs = {"set": given.settings, **{name: getattr(given, name) for name in ("samples", "preset", "adapter")}}
        if given.artefacts and (changed := [name for name, value in of_runs.items() if value]):
            raise ConfigError(
                f"--artefacts mixes no settings in the paper's figures; leave --{changed[0]} out, or leave --artefacts "
                "out"
            )

    def _check_preset(self, decoders: Sequence[str]) -> None:
        """Raises ConfigError if no system of these decoders can use the settings table that was given."""
        preset = self.given.preset
        if own := own_table(preset):
            if (decoder := read_yaml(own, str(own)).get("decoder")) not in decoders:
                listed = " or ".join(dict.fromkeys(decoders))
                raise ConfigError(f"{own} says `decoder: {decoder}`; the systems of this suite need {listed}")
        elif preset and (self.model == EMBEDDED or not any(_has_preset(decoder, preset) for decoder in decoders)):
            raise ConfigError(f"--preset: no settings table of these systems is called '{preset}'")

    def _own_table(self, decoder: str) -> str:
        """The file of --preset if it is for this decoder, else nothing."""
        preset: str = self.given.preset
        return preset if own_table(preset) and _has_preset(decoder, preset) else ""

    def _check_checkpoints(self) -> None:
        """Says within seconds whether model and baseline can run, because the first run may take hours."""
        checks = [(self.baseline, "autoregressive", "baseline with --baseline, or run without one (--no-baseline)")]
        if not self._systems and self.model != EMBEDDED:
            checks.insert(0, (self.model, self._decoder, "model with --model"))
        statuses = [self.step("check", model=model, decoder=decoder) for model, decoder, _ in checks]
        for status, (*_, advice) in zip(statuses, checks, strict=True):
            if status:
                say(f"name another {advice}")
        if any(statuses):
            raise SystemExit(1)

    def _runs(self) -> Iterator[PlannedRun]:
        arguments_of = {name: self._folder_and_options(name) for name in self.names}
        if not self._systems:
            arguments = {"model": self.model, "decoder": self._decoder}
            folder = f"{Path(self.model).name}-{self._decoder}"
            arguments_of[self._decoder] = self._with_preset(folder, arguments, self._decoder)
        for name, (folder, arguments) in arguments_of.items():
            run_dir = f"{self.runs}/{folder}"
            if name == REFUSION:
                yield self.planned(name, f"{run_dir}-unfused", {**arguments, "settings": [UNFUSED]})
            else:
                yield self.planned(name, run_dir, arguments)
            # Beside a server, the same model under transformers' own loop shows what each engine gains.
            if name == self._baseline_of_server:
                yield self.planned(f"{name}, generate", f"{run_dir}-generate", {**arguments, "loop": "generate"})
            for option, variants in BESIDE.items():
                for system, variant, settings in variants:
                    if system == name and (getattr(self.given, option) or self.model == EMBEDDED):
                        beside = {**arguments, "settings": settings}
                        yield self.planned(f"{name}, {variant}", f"{run_dir}-{variant}", beside)

    @property
    def _baseline_of_server(self) -> str:
        """The autoregressive system beside a server, whose prompts and tokenizer it shares; empty for none."""
        others = [name for name in self.names if not _is_server(name) and decoder_of_system(name) == AUTOREGRESSIVE]
        return others[0] if others and len(others) < len(self.names) and any(map(_is_server, self.names)) else ""

    def _of_server(self, name: str) -> tuple[str, dict[str, Any]]:
        """Folder and options of the run of a server."""
        published_server = name in published_systems()
        beside = "" if published_server else self._baseline_of_server
        model: dict[str, Any] = {} if self.model == ALL_PUBLISHED else {"model": self.model}
        if beside and self.model == EMBEDDED:
            model = {"model": f"{EMBEDDED}:{embedded_systems()[beside][0]}"}
        elif beside and self.model == ALL_PUBLISHED:
            published = published_systems()[beside]
            model = {"model": str(published.pretrained), **({} if published.enable_thinking else NO_THINKING)}
        options = {"system": name, **model, **self.values(*TO_SERVERS)}
        # Several servers may run one model, so a folder says which of them it is.
        place = server_folder(name.partition(":")[2] or self.given.base_url, self.given.server_name)
        folder = name if published_server else place
        folder = folder if self.model == ALL_PUBLISHED else f"{Path(self.model).name}-{folder}"
        return self._with_preset(folder, options, AUTOREGRESSIVE, "" if self.model == EMBEDDED else name)

    def _folder_and_options(self, name: str) -> tuple[str, dict[str, Any]]:
        if _is_server(name):
            return self._of_server(name)
        given = self._arguments[name]
        options: dict[str, Any] = {"model" if key == "pretrained" else key: value for key, value in given.items()}
        if "decoder" in given:
            return self._with_preset(f"{EMBEDDED}-{name}", options, given["decoder"])
        folder = f"{Path(given['model']).name}-{name}" if "model" in given else name
        options |= {"adapter": self._adapter} if self._adapter else {}
        return self._with_preset(folder, options, published_systems()[name].decoder, name)

    def _with_preset(
        self, folder: str, options: dict[str, Any], decoder: str, system: str = ""
    ) -> tuple[str, dict[str, Any]]:
        """Folder and options of a run with the settings table that it gets; `system` is a published one."""
        preset = self._own_table(decoder) if own_table(self.given.preset) else self.given.preset
        preset = preset or (LONG_RESPONSES if system and decoder == "autoregressive" else "")
        if preset and _has_preset(decoder, preset):
            return folder + _suffix(preset), {**options, "preset": preset}
        if preset:
            say(f"{system} has no settings table '{preset}' and runs with its own")
        return folder, options


def _check_in_suite(names: Sequence[str], suite: str) -> None:
    """Raises ConfigError for a name that is neither a benchmark of the suite nor another form of one."""
    names = list(map(main_variant, names))
    listed = [benchmark.name for benchmark in SUITES[suite]]
    folders = {benchmark.folder for benchmark in SUITES[suite]}
    known = [name for name in names if name in PUBLISHED and not PUBLISHED[name].in_paper]
    forms = [name for name in known if PUBLISHED[name].folder in folders]  # such as another window of LiveCodeBench
    check_keys(names, [*listed, *forms], f"--suite {suite}", what="task", offered=listed)


def _absolute(checkpoint: str) -> str:
    """The absolute path of a folder or file, which records and names of runs hold; a hub id stays as it is."""
    return str(Path(checkpoint).absolute()) if checkpoint and Path(checkpoint).exists() else checkpoint


def _is_server(name: str) -> bool:
    published = published_systems().get(name)
    return name.partition(":")[0] == SERVER or (published is not None and published.decoder == SERVER)


def _suffix(preset: str) -> str:
    """What the name of a folder says about a settings table; a file is named without its folder and ending."""
    return f"-{Path(preset).stem}" if preset else ""


def _has_preset(decoder: str, preset: str) -> bool:
    try:
        check_preset(decoder, preset)
    except ConfigError:
        return False
    return True
