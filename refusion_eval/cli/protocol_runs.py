"""The runs of a protocol: what `protocol run` starts, and `suite` without a choice of systems."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from refusion_eval.benchmarks import BENCHMARKS, OURS
from refusion_eval.cli import names_of
from refusion_eval.cli.suite_runs import PlannedRun, Runs
from refusion_eval.config import check_keys
from refusion_eval.errors import ConfigError
from refusion_eval.evaluation.turns import Turn, run_in_turns
from refusion_eval.paths import EMBEDDED
from refusion_eval.protocol.spec import DEFAULT, METRICS, Protocol, read_protocol
from refusion_eval.runs.model_args import LAUNCH_ARGUMENTS, ModelArgs

# Options of `run` beside a protocol: they make another protocol, with a hash of its own, or say where it runs.
_MAY_CHANGE = (
    *("batch_size", "tps_samples", "kv_budget_gib", "dtype", "device", "attention", "cuda_graphs", "warmup"),
    *("api_key_env", "timeout", "patience", *LAUNCH_ARGUMENTS),
)


SUITE_CONTINUES = "what is finished is recorded; run the same command again to continue"


class ProtocolRuns(Runs):
    """Runs the systems of a protocol; options of `given` that change a number make it another protocol."""

    def __init__(self, given: SimpleNamespace, name: str, runs: str, tables: str) -> None:
        super().__init__(given)
        self.name, self.runs, self.tables = name, runs, tables
        self.protocol = changed(read_protocol(name), given.tasks, given.limit, rounds=given.rounds)

    def run(self) -> None:
        several, baseline = len(self.protocol.seeds) > 1, self.protocol.baseline
        planned = [
            PlannedRun(
                folder,
                f"{self.runs}/{folder}",
                ["--protocol", f"{self.name}:{system}", *(("--seed", str(seed)) if several else ())],
            )
            for folder, system, seed in self.protocol.runs()
            if system != baseline or not self.given.no_baseline
        ]
        run_in_turns(planned, self._take_turn, rounds=self.protocol.rounds, limit=self.protocol.limit)
        if not self.run_dirs:
            raise SystemExit(self.status)
        self.write_table(self.tables)

    def _take_turn(self, run: PlannedRun, turn: Turn) -> bool:
        graphs = ["--no-cuda-graphs"] if self.given.no_cuda_graphs else []
        options = [*graphs, *self.options("tasks", "limit", "data", "sandbox")]
        words = ("--run-dir", run.run_dir, *run.arguments, *options, "--round", f"{turn.number}/{turn.of}")
        status = self.step("run", *words)
        if not status and run.run_dir not in self.run_dirs:
            self.run_dirs.append(run.run_dir)
        self.go_on_without(status, f"{run.name} failed")
        return not status

    @property
    def reference(self) -> list[str]:
        of_baseline = [folder for folder, system, _ in self.protocol.runs() if system == self.protocol.baseline]
        there = [folder for folder in of_baseline if f"{self.runs}/{folder}" in self.run_dirs]
        metrics = [] if self.protocol.metrics == METRICS else ["--metrics", ",".join(self.protocol.metrics)]
        return [*(["--baseline", there[0]] if there else []), *metrics]


def default_runs(given: SimpleNamespace) -> ProtocolRuns | None:
    """The runs of the protocol that stands for a suite without options; None where options choose other systems."""
    chosen = (given.system, given.preset, given.adapter, given.baseline, given.artefacts, given.include_path)
    is_default = given.model in ("", EMBEDDED) and given.suite == "paper" and given.prompts in (None, OURS)
    # Tasks of lm-eval have no version here, so that no protocol can name them.
    are_own = all(name in BENCHMARKS or name.startswith(("mini_", "refusion_")) for name in names_of(given.tasks))
    if any(chosen) or not is_default or not are_own:
        return None
    results = given.results or given.root / "results"
    tables = given.results or given.root / "results" / "local"
    return ProtocolRuns(given, DEFAULT, f"{results}/runs", f"{tables}/{EMBEDDED}")


def changed(protocol: Protocol, tasks: str, limit: int | None, **values: Any) -> Protocol:
    """A protocol with other tasks, another limit, or other values."""
    return protocol.changed(tasks=tuple(names_of(tasks)), limit=limit, **values)


class RunOfProtocol(NamedTuple):
    args: ModelArgs
    tasks: list[str]
    limit: int | None
    run_dir: Path


def run_of_protocol(
    place: str,
    given: Mapping[str, Any],
    tasks: str,
    limit: int | None,
    *,
    seed: int | None,
    turn: Turn | None,
    beside: Mapping[str, object],
) -> RunOfProtocol:
    """The run of one system of a protocol (`FILE:SYSTEM`), under the options of `run` that may stand beside it."""
    defaults = {entry.name: entry.default for entry in fields(ModelArgs)}
    arguments = {name: value for name, value in given.items() if str(value) != str(defaults[name])}
    others = {**beside, **{name: value for name, value in arguments.items() if name not in _MAY_CHANGE}}
    if wrong := [name for name, value in others.items() if value is not None and value != ""]:
        raise ConfigError(f"--protocol {place} decides {', '.join(wrong)}: leave it out, or change the protocol's file")
    name, _, system = place.rpartition(":")
    if not name:
        raise ConfigError(f"--protocol {place}: write it as FILE:SYSTEM, for example {DEFAULT}:embedded-autoregressive")
    rounds = 1 if turn is None else turn.of
    protocol = changed(read_protocol(name), tasks, limit, rounds=rounds, arguments=arguments)
    check_keys([system], protocol.systems, f"protocol {name}", what="system")
    run_dir = default_folder(protocol) / "runs" / system
    return RunOfProtocol(protocol.stamped(system, seed), protocol.task_names(system), protocol.limit, run_dir)


def default_folder(protocol: Protocol) -> Path:
    return Path("results/protocols") / protocol.label.replace("@", "-")
