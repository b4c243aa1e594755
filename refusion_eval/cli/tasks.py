from refusion_eval.cli import Json, print_json


def tasks(as_json: Json = False) -> None:
    """List the tasks that --tasks names. Without --model, a benchmark's name means its synthetic look-alike."""
    from refusion_eval.benchmarks import BENCHMARKS, PUBLISHED, Task

    listed = [Task(benchmark) for benchmark in PUBLISHED.values()]
    listed += [Task(benchmark, mini=True) for benchmark in BENCHMARKS.values() if benchmark.has_mini]
    rows = [(task.benchmark.name, task.name, task.benchmark.kind, task.benchmark.metric, task.mini) for task in listed]
    if as_json:
        print_json(("benchmark", "task", "kind", "metric", "mini"), rows)
        return
    for benchmark, task, kind, metric, *_ in rows:
        print(f"{benchmark:<14} {task:<24} {kind:<12} {metric}")
