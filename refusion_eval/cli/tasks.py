from refusion_eval.cli import Json, print_json


def tasks(as_json: Json = False) -> None:
    """List the tasks that --tasks names. Without --model, a benchmark's name means its synthetic look-alike."""
    from refusion_eval.benchmarks import BENCHMARKS, PUBLISHED, Task

    known = [(one, Task(one)) for one in PUBLISHED.values()]
    known += [(one, Task(one, mini=True)) for one in BENCHMARKS.values() if one.has_mini]
    rows = [(one.name, task.name, one.kind, one.metric, task.mini) for one, task in known]
    if as_json:
        print_json(("benchmark", "task", "kind", "metric", "mini"), rows)
        return
    for benchmark, task, kind, metric, *_ in rows:
        print(f"{benchmark:<14} {task:<24} {kind:<12} {metric}")
