"""What differs between protocols, or between a protocol and the records of a run; and what a protocol would run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from refusion_eval.benchmarks import Task
from refusion_eval.metrics import by_item
from refusion_eval.paths import embedded_name
from refusion_eval.protocol.spec import Protocol, deciding, read_protocol
from refusion_eval.results.facts import RunFacts, read_facts
from refusion_eval.results.published import published_measurements, system_key
from refusion_eval.results.render import Table
from refusion_eval.runs.model_args import ModelArgs
from refusion_eval.store.manifest import differences, split_code
from refusion_eval.store.records import as_json, checking
from refusion_eval.store.run_files import RUN_JSON
from refusion_eval.store.run_store import RunReader

# Fields of a protocol that no run records: they are about several runs, or about how numbers are made or items chosen.
_OF_SEVERAL_RUNS = ("schema", "metrics", "baseline", "analysis", "spread")
_OF_CHECKPOINTS = ("mask_id", "eos_ids", "seed")


def protocol_differences(first: str, second: str, **allowed: Any) -> list[str]:
    """One line for every field in which two protocols, or a protocol and a run directory, differ.

    Args:
        **allowed: what `read_protocol` allows a file.
    """
    names = (first, second)
    are_runs = [(Path(name) / RUN_JSON).is_file() for name in names]
    if not any(are_runs):
        return _differences([read_protocol(name, **allowed, is_alone=False).content() for name in names], names)
    if all(are_runs):
        return _differences([_of_run(name, {}) for name in names], names)
    order = 1 if are_runs[0] else -1  # in which a run and a protocol are named
    run, protocol = names[::order]
    read = read_protocol(protocol, **allowed, is_alone=False)
    with RunReader.open(run) as reader:
        stamp = reader.run.manifest.protocol
    content, system = read.content(), stamp.get("system", "")
    # A run outside the protocol is compared with the system that it differs least from.
    possible = [system] if system in read.systems else read.systems
    candidates = [_differences(_sides(run, content, one)[::order], names) for one in possible]
    found = min(candidates, key=len)
    if stamp and stamp["hash"] != read.hash:
        one, other = (stamp["label"], read.label)[::order]
        found = [*differences({"protocol": one}, {"protocol": other}, names), *found]
    return found


def _differences(contents: Sequence[Mapping[str, Any]], names: tuple[str, str]) -> list[str]:
    """The differences of two contents; a task or system that one of them lacks is one line, without its settings."""
    first, second = contents
    return differences(_beside(first, second), _beside(second, first), names)


def _beside(content: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    def of_common_tasks(part: Mapping[str, Any]) -> dict[str, Any]:
        settings = part.get("settings", {})
        return {**part, "settings": {task: settings[task] for task in settings if task in other["tasks"]}}

    others = other.get("systems", {})
    systems = {
        name: of_common_tasks(part) if name in others else "there" for name, part in content.get("systems", {}).items()
    }
    return of_common_tasks({**content, "systems": systems})


def _sides(run_dir: str, content: Mapping[str, Any], system: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a run recorded and what a protocol says of one of its systems, in the same form."""
    own = content["systems"][system]
    recorded = _of_run(run_dir, own)
    wanted = {name: value for name, value in content.items() if name not in (*_OF_SEVERAL_RUNS, "systems")} | own
    wanted["tasks"] = {name: version for name, version in content["tasks"].items() if name in own["settings"]}
    wanted["seeds"] = recorded["seeds"] if set(recorded["seeds"]) <= set(content["seeds"]) else content["seeds"]
    if recorded.get("unfinished"):  # the rounds of a run are known when it is finished
        del wanted["rounds"], recorded["rounds"]
    return recorded, wanted


def _of_run(run_dir: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """The records of a run in the form of a protocol's content; `own` is what the protocol says of the system."""
    facts = read_facts(run_dir)
    with checking(f"{run_dir}: the description of the run"):
        return _content_of(facts, own)


def _content_of(facts: RunFacts, own: Mapping[str, Any]) -> dict[str, Any]:
    manifest, tasks = facts.run.manifest, facts.tasks
    defaults = {entry.name: entry.default for entry in fields(ModelArgs)}
    given = {name: value for name, value in manifest.arguments.items() if name in defaults}
    given |= {"batch_size": None} if given.get("batch_size") == "auto" else {}
    # Samples may have been added to the run since its arguments were recorded.
    of_items = [len(of_item) for task in tasks for of_item in by_item(task.samples)]
    given["samples"] = max([given.get("samples", 1), *of_items])
    if split_code(manifest.decoder)[0] == given.get("decoder"):
        given["decoder"] = manifest.decoder
    if "chat_template" in given:
        given["chat_template"] = manifest.settings.get("chat_template", given["chat_template"])
    if "cuda_graphs" not in own.get("arguments", {}):  # the record says what the default was on that machine
        given.pop("cuda_graphs", None)
    settings = {}
    for task in tasks:
        known = own.get("settings", {}).get(task.task, {})
        settings[task.task] = {
            name: value for name, value in task.settings.items() if name in known or name not in _OF_CHECKPOINTS
        }
    limited = [task.extent.expected // given["samples"] for task in tasks if task.extent.limited]
    unfinished = {task.task: task.extent.unfinished for task in tasks if task.extent.unfinished}
    content = {
        "limit": max(limited, default=None),
        "rounds": max(facts.run.round(process_id) for process_id in facts.run.processes),
        "seeds": [manifest.seed],
        "tasks": {task.task: task.task_version for task in tasks},
        "arguments": deciding(given),
        "settings": settings,
    }
    return as_json(content | ({"unfinished": unfinished} if unfinished else {}))


class _Cost(NamedTuple):
    samples: int
    hours: float | None
    source: str


def check_table(protocol: Protocol, out: Path) -> Table:
    """What a protocol would run; hours by the runs in `out`, or by the latencies that the paper prints."""
    rows, costs = [], []
    for system in protocol.systems:
        args, tasks = protocol.arguments(system), protocol.tasks_of(system)
        cost = _cost(protocol, args, tasks, [out / "runs" / name for name, of, _ in protocol.runs() if of == system])
        costs.append(cost)
        hours = "not known" if cost.hours is None else f"{cost.hours:.2f} ({cost.source})"
        rows.append((system, args.pretrained, _pinned(args), args.decoder, f"{cost.samples:,}", hours))
    known = [cost.hours for cost in costs if cost.hours is not None]
    total = f"{sum(known):.2f}" if len(known) == len(costs) else "not known"
    rows.append(("all", "", "", "", f"{sum(cost.samples for cost in costs):,}", total))
    content = protocol.content()
    versions = content["tasks"]
    limit = "all items" if protocol.limit is None else f"{protocol.limit} items"
    return Table(
        title=f"Protocol {protocol.label_of(content)}",
        columns=("System", "Checkpoint", "Revision", "Decoder", "Samples", "Hours"),
        rows=rows,
        num_left=4,
        notes=(
            protocol.about,
            f"Tasks with their versions: {', '.join(f'{name} {version}' for name, version in versions.items())}; "
            f"{limit} of each, seeds {', '.join(map(str, protocol.seeds))}, {content['rounds']} rounds.",
            "Hours: of decoding one request at a time, by the runs that are there, or by the latencies of the paper's "
            "Table 9 (A100). Nothing was opened or asked for.",
        ),
    )


def _pinned(args: ModelArgs) -> str:
    if embedded_name(args.pretrained, args.decoder) is not None:
        return "in the package"
    if (place := Path(args.pretrained)).exists():
        return f"a {'folder' if place.is_dir() else 'file'}, recorded by its hash"
    if args.pretrained.startswith((".", "/", "~")):
        return "there is no such folder yet"
    revision = "not pinned" if args.pinned is None else f"pinned ({args.pinned[:12]})"
    return revision + (", adapter not pinned" if args.adapter else "")


def _cost(protocol: Protocol, args: ModelArgs, tasks: list[Task], run_dirs: list[Path]) -> _Cost:
    numbers = {task: _num_items(task) for task in tasks}
    numbers = {task: min(number, protocol.limit or number) * args.samples for task, number in numbers.items()}
    samples = len(protocol.seeds) * sum(numbers.values())
    recorded = dict(_recorded_seconds(run_dirs))
    system = system_key(args.system_name, args.backbone or "", {}, loop="")
    published = {
        entry.benchmark: entry.value
        for entry in published_measurements(("table9_v2",))
        if (entry.system, entry.metric) == (system, "latency_mean")
    }
    printed = {task.name: published.get(task.benchmark.name) for task in tasks if not task.mini}
    for source, means in (("recorded", recorded), ("the paper's A100", printed)):
        seconds = [(means.get(task.name), number) for task, number in numbers.items()]
        if all(mean is not None for mean, _ in seconds):
            per_seed = sum((mean or 0) * number for mean, number in seconds)
            return _Cost(samples, len(protocol.seeds) * per_seed / 3600, source)
    return _Cost(samples, None, "")


def _num_items(task: Task) -> int:
    return len(task.items()) if task.mini else task.benchmark.source.num_rows


def _recorded_seconds(run_dirs: list[Path]) -> Iterator[tuple[str, float]]:
    """Task -> mean seconds of its samples in the first run directory that is there."""
    for run_dir in run_dirs:
        if (run_dir / RUN_JSON).is_file():
            for task in read_facts(run_dir).tasks:
                if task.samples:
                    yield task.task, sum(sample.seconds for sample in task.samples) / len(task.samples)
            return
