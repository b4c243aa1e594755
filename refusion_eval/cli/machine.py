import refusion_eval
from refusion_eval import cli, paths
from refusion_eval.benchmarks import BENCHMARKS, PUBLISHED, Task
from refusion_eval.cli import parameters
from refusion_eval.runs.systems import published_systems


def doctor(data: parameters.Data = None, as_json: parameters.Json = False) -> None:
    """Report what this machine can do. It lists versions, devices, the sandbox, tasks, data and the lm_eval hook."""
    from refusion_eval.doctor import report

    facts = report(data)
    if as_json:
        cli.print_json(("name", "found"), facts)
        return
    for name, text in facts:
        print(f"{name}: {text}")


def systems(as_json: parameters.Json = False) -> None:
    """List the published systems that --system names."""
    published = published_systems().values()
    if as_json:
        columns = ("name", "label", "decoder", "pretrained", "adapter", "serve", "source")
        cli.print_json(columns, ([getattr(system, column) for column in columns] for system in published))
        return
    for system in published:
        checkpoint = system.pretrained or "no published checkpoint; give --model"
        adapter = f" + {system.adapter}" if system.adapter else ""
        served = f", served by: {system.serve}" if system.serve else ""
        print(f"{system.name:<16} {system.label:<22} {system.decoder:<16} {checkpoint}{adapter}{served}")


def tasks(as_json: parameters.Json = False) -> None:
    """List the tasks that --tasks names. Without --model, a benchmark's name means its synthetic look-alike."""
    listed = [Task(benchmark) for benchmark in PUBLISHED.values()]
    listed += [Task(benchmark, mini=True) for benchmark in BENCHMARKS.values() if benchmark.has_mini]
    rows = [(task.benchmark.name, task.name, task.benchmark.kind, task.benchmark.metric, task.mini) for task in listed]
    if as_json:
        cli.print_json(("benchmark", "task", "kind", "metric", "mini"), rows)
        return
    for benchmark, task, kind, metric, *_ in rows:
        print(f"{benchmark:<14} {task:<24} {kind:<12} {metric}")


def tasks_path() -> None:
    """Print the folder of the task files. lm_eval takes it as --include_path."""
    print(paths.tasks_path())


def version() -> None:
    """Print the version, as --version does."""
    print(refusion_eval.__version__)
