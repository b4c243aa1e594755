from pathlib import Path
from typing import Annotated, Any

import typer

from refusion_eval import cli
from refusion_eval.benchmarks import get_task
from refusion_eval.cli import parameters
from refusion_eval.errors import ConfigError
from refusion_eval.results.render import csv_text
from refusion_eval.store.atomic_write import prepare_output, write_output


def score(
    task: Annotated[str, typer.Option(help="Task whose rules judge the texts: gsm8k, mini_gsm8k, ...")],
    outputs: Annotated[
        str,
        typer.Option(
            help='JSON lines {"id": ..., "text": ...}, a file of lm-eval, EvalPlus, inspect_ai or OpenAI, or gold for '
            "the gold answers."
        ),
    ],
    data: parameters.Data = None,
    split: Annotated[str | None, typer.Option(help="Split of the rows, if it is not the evaluated one.")] = None,
    csv: Annotated[
        Path | None,
        typer.Option(
            help="CSV, a line for each text. The default is x.scores.csv beside x.jsonl, or TASK.gold.csv here."
        ),
    ] = None,
    filter_name: Annotated[str | None, typer.Option("--filter", help="Another rule that extracts the answer.")] = None,
    allow_partial: Annotated[bool, typer.Option(help="Leave rows without a text out of the score.")] = False,
    workers: parameters.Workers = None,
    sandbox: parameters.Sandbox = "auto",
    as_json: parameters.Json = False,
) -> None:
    """Judge texts from anywhere by the rules of a task."""
    from refusion_eval.scoring import score as scoring
    from refusion_eval.scoring.outputs import read_outputs

    of_task = get_task(task)
    benchmark, rows = of_task.benchmark, of_task.rows(data, split)
    benchmark.check_gold(rows)
    ids = scoring.index_rows(benchmark, rows)
    if outputs == scoring.GOLD:
        texts = {item: [benchmark.prompts.gold_text(row)] for item, row in ids.items()}
    else:
        texts = read_outputs(Path(outputs), benchmark, ids)
    target = prepare_output(csv or scoring.default_csv_path(task, outputs))
    kept = scoring.VerdictFile(target, f"sandbox {sandbox}")
    judging: dict[str, Any] = {"workers": workers, "sandbox": sandbox, "kept": kept}
    scores = scoring.score_texts(benchmark, rows, texts, filter_name=filter_name, **judging)
    stated = scoring.stated_scores(benchmark, rows, texts, **judging)
    cells = scoring.score_cells(scores, allow_partial=allow_partial)
    write_output(target, csv_text(scoring.COLUMNS, cells, line_end="\r\n"))
    kept.remove()
    if as_json:
        facts: dict[str, Any] = {"task": task, "filter": filter_name or benchmark.default_filter}
        means = [scoring.mean_score(of_rule, allow_partial=allow_partial) for of_rule in (scores, stated) if of_rule]
        columns = ("value", "ci_low", "ci_high", "n")
        cells_of_rule, *of_stated = cli.objects(columns, [(one.value, one.low, one.high, one.n) for one in means])
        facts |= {"metric": benchmark.metric, **cells_of_rule, "unit": "%"}
        facts |= scoring.Counts.of(scores, stated)._asdict() | {"stated": of_stated[0] if of_stated else None}
        cli.print_value(facts | {"texts": cli.objects(scoring.COLUMNS, cells)})
        return
    name = f"{'mini ' if of_task.mini else ''}{benchmark.name} (filter {filter_name or benchmark.default_filter})"
    cli.tell("\n".join(scoring.summary_lines(name, benchmark, scores, stated, allow_partial=allow_partial)))
    print(f"  one line a text: {target}")


def rescore(
    run_dirs: Annotated[list[Path] | None, typer.Argument(help="Run directories, finished or not.")] = None,
    filter_name: Annotated[
        str, typer.Option("--filter", help="A public answer filter, your own as module:function, or list.")
    ] = "ours",
    list_filters: Annotated[bool, typer.Option("--list-filters", help="Print the filters and stop.")] = False,
    tasks: Annotated[str, typer.Option(help="Tasks or benchmarks, separated by commas. The default is all.")] = "",
    data: parameters.Data = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results, one folder for each run. The default is RUN/rescored.")
    ] = None,
    workers: parameters.Workers = None,
    sandbox: parameters.Sandbox = "auto",
) -> None:
    """Judge recorded texts with another answer filter. Nothing is decoded; the scores join the records of the run."""
    from refusion_eval.lm_eval_plugin.filters import describe, find_filter
    from refusion_eval.scoring.rescore import rescore_command

    if list_filters or filter_name == "list":
        print("\n".join(describe()))
        return
    if not run_dirs:
        raise ConfigError("no run directory is given; name one or more, as refusion-eval rescore RUN --filter NAME")
    num_differing = rescore_command(
        run_dirs,
        find_filter(filter_name),
        tasks=parameters.names_of(tasks),
        data=data,
        out=out,
        workers=workers,
        sandbox=sandbox,
        console=cli.console(),
    )
    if num_differing:
        cli.say(f"error: {num_differing} verdicts are not the recorded ones")
        raise typer.Exit(1)
