"""The runs of a protocol: what `protocol run` starts, and `suite` without a choice of systems."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from refusion_eval.benchmarks import BENCHMARKS, OURS, main_variant
from refusion_eval.cli import say
from refusion_eval.cli.parameters import names_of
from refusion_eval.cli.plans import model_arguments
from refusion_eval.cli.suite_runs import Runs
from refusion_eval.errors import ConfigError
from refusion_eval.paths import EMBEDDED
from refusion_eval.protocol.spec import DEFAULT, METRICS, read_protocol
from refusion_eval.results.measurement import NO_PROTOCOL
from refusion_eval.runs.model_args import LAUNCH_ARGUMENTS, TO_SERVERS
from refusion_eval.runs.plan import Plan, PlannedRun, Turn, turns
from refusion_eval.store.run_files import RUN_JSON
from refusion_eval.store.run_store import RunReader

# Options of `run` beside a protocol that make another protocol of it, those that only say where and how it runs, and
# those that it decides, beside all other model arguments.
_CHANGES = ("batch_size", "tps_samples", "kv_budget_gib", "dtype", "device", "attention", "cuda_graphs", "warmup")
_PLACES = ("timeout", "patience", *LAUNCH_ARGUMENTS)
_DECIDED = ("system", "prompts", "include_path", "settings", "concurrency", "thought_budget")

SUITE_CONTINUES = "what is finished is recorded; run the same command again to continue"


class ProtocolRuns(Runs):
    """Runs the systems of a protocol, or a part of it: some of its tasks, or fewer items of each.

    Args:
        given: options of the command; other tasks and more items than the file's make another protocol.
        arguments: model arguments, which make another protocol.
        out: folder of runs and table; by default one that is named by the protocol and its hash.
        shared: the folders of runs and of the table, where both may hold those of other protocols.
    """

    def __init__(
        self,
        given: SimpleNamespace,
        name: str,
        out: Path | None = None,
        *,
        shared: tuple[str, str] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(given)
        self.name, self._is_shared, self._arguments = name, shared is not None, arguments or {}
        protocol = read_protocol(name, **allowed_by(given)).changed(arguments)
        # Fewer items than rounds are decoded in fewer rounds, which is no other protocol.
        is_same = given.rounds == min(protocol.rounds, given.limit or protocol.rounds)
        protocol = protocol.changed(rounds=None if is_same else given.rounds)
        self.protocol = protocol.part(tuple(names_of(given.tasks)), given.limit)
        self._content = self.protocol.content()
        self.label = self.protocol.label_of(self._content)
        folder = out or Path("results/protocols") / self.label.replace("@", "-")
        self.runs, self.table_folder = shared or (f"{folder}/runs", str(folder))

    def run(self) -> None:
        self._check_folders()
        super().run()

    def plan(self) -> Plan:
        baseline = self.protocol.baseline
        planned = [
            self.planned(folder, system, seed)
            for folder, system, seed in self.protocol.runs()
            if system != baseline or not self.given.no_baseline
        ]
        return Plan(runs=tuple(planned), turns=turns(self.protocol.rounds, self.protocol.limit))

    def planned(self, folder: str, system: str, seed: int, **places: Any) -> PlannedRun:
        """The run of a system with a seed; `places` are model arguments that are no part of a protocol."""
        data, tracker = self.given.data, getattr(self.given, "tracker", None)
        own = {"run_dir": f"{self.runs}/{folder}", "data_dir": None if data is None else str(data), "tracker": tracker}
        places = own | places
        options = {"run_dir": places["run_dir"], "protocol": f"{self.name}:{system}"}
        options |= {"seed": seed} if len(self.protocol.seeds) > 1 else {}
        options |= {"cuda_graphs": False} if "cuda_graphs" in self._arguments else {}
        # The run is told the rounds: with fewer items than rounds, its turn does not say them.
        options |= self.values("tasks", "limit", "data", "sandbox", "rounds", "api_key_env", "tracker")
        options |= {"allow_code": True} if getattr(self.given, "allow_code", False) else {}
        return PlannedRun(
            args=replace(self.protocol.stamped(system, seed, self._content), **places),
            tasks=tuple(self.protocol.task_names(system)),
            limit=self.protocol.limit,
            sandbox=self.given.sandbox,
            name=folder,
            options=options,
        )

    def _check_folders(self) -> None:
        """Refuses folders with other contents. Only shared ones may have records of other protocols, and it says so."""
        advice = f"give another folder with {'--results' if self._is_shared else '--out'}"
        if Path(table := self.table_folder, RUN_JSON).exists():
            raise ConfigError(f"{table} is itself a run directory, whose table would be overwritten; {advice}")
        recorded: set[str] = set()
        for folder, *_ in self.protocol.runs():
            if (Path(self.runs) / folder / RUN_JSON).exists():
                with RunReader.open(Path(self.runs) / folder) as reader:
                    recorded |= reader.protocols()
        own = self.label.rpartition("@")[2]  # the file may have been renamed
        if others := sorted(label or NO_PROTOCOL for label in recorded if label.rpartition("@")[2] != own):
            found = f"{self.runs} has records of {', '.join(others)}, and this is {self.label}"
            if not self._is_shared:
                raise ConfigError(f"{found}: numbers of several protocols are never merged; {advice}")
            say(f"note: {found}: each has rows of its own, without the samples of the others. To have all, {advice}")

    @property
    def reference(self) -> dict[str, str]:
        of_baseline = [folder for folder, system, _ in self.protocol.runs() if system == self.protocol.baseline]
        there = [folder for folder in of_baseline if f"{self.runs}/{folder}" in self.run_dirs]
        metrics = {} if self.protocol.metrics == METRICS else {"metrics": ",".join(self.protocol.metrics)}
        return {**({"baseline": there[0]} if there else {}), **metrics}


def allowed_by(given: SimpleNamespace) -> dict[str, Any]:
    """What the options of a command allow the file of a protocol, as `read_protocol` takes it."""
    variable = getattr(given, "api_key_env", None)
    of_servers = {} if variable is None else {"api_key_env": variable}
    return {"allow_code": getattr(given, "allow_code", False), "of_servers": of_servers}


def default_runs(given: SimpleNamespace) -> ProtocolRuns | None:
    """The runs of the protocol that stands for a suite without options; None where options choose other runs."""
    chosen = [given.system, given.preset, given.adapter, given.baseline, given.artefacts, given.include_path]
    chosen += [given.samples, given.settings, *(getattr(given, name) for name in TO_SERVERS)]
    is_default = given.model in ("", EMBEDDED) and given.suite == "paper" and given.prompts in (None, OURS)
    # Tasks of lm-eval have no version here, so that no protocol can name them.
    names = list(map(main_variant, names_of(given.tasks)))
    are_own = all(name in BENCHMARKS or name.startswith(("mini_", "refusion_")) for name in names)
    if any(chosen) or not is_default or not are_own:
        return None
    results = given.results or given.root / "results"
    tables = given.results or given.root / "results" / "local"
    arguments = {"cuda_graphs": False} if given.no_cuda_graphs else {}
    return ProtocolRuns(given, DEFAULT, shared=(f"{results}/runs", f"{tables}/{EMBEDDED}"), arguments=arguments)


def plan_of_protocol(options: Mapping[str, Any]) -> Plan:
    """The plan of `run --protocol FILE:SYSTEM` with these options, by their names in Python."""
    turn = Turn.read(options["turn"]) if "turn" in options else None
    place, given = str(options["protocol"]), model_arguments(options)
    decided = [{"settings": "set"}.get(name, name.replace("_", "-")) for name in _DECIDED if options.get(name)]
    decided += [name for name in given if name not in (*_CHANGES, *_PLACES, "api_key_env")]
    if decided:
        raise ConfigError(
            f"--protocol {place} decides {', '.join(decided)}: leave it out, or change the protocol's file"
        )
    name, _, system = place.rpartition(":")
    if not name:
        raise ConfigError(f"--protocol {place}: write it as FILE:SYSTEM, for example {DEFAULT}:embedded-autoregressive")
    arguments, places = ({key: given[key] for key in names if key in given} for names in (_CHANGES, _PLACES))
    places |= {"run_dir": str(options["run_dir"])} if "run_dir" in options else {}
    of_run = {key: options.get(key) for key in ("limit", "data", "api_key_env")}
    of_run |= {"tasks": options.get("tasks", ""), "sandbox": options.get("sandbox", "auto")}
    of_run |= {"rounds": options.get("rounds") or (turn and turn.of), "allow_code": "allow_code" in options}
    runs = ProtocolRuns(SimpleNamespace(**of_run), name, arguments=arguments)
    seed = options.get("seed", runs.protocol.seeds[0])
    folder = next((folder for folder, *of in runs.protocol.runs() if of == [system, seed]), system)
    planned = runs.planned(folder, system, seed, **places)
    return Plan(runs=(planned,), turns=(turn,) if turn else turns(runs.protocol.rounds, runs.protocol.limit))
