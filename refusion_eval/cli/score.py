from pathlib import Path
from typing import Annotated

import typer

from refusion_eval.cli import Data, Json, Sandbox, Workers, print_json, tell


def score(
    task: Annotated[str, typer.Option(help="Task whose rules judge the texts: gsm8k, mini_gsm8k, ...")],
    outputs: Annotated[
        str,
        typer.Option(
            help='JSON lines {"id": ..., "text": ...}, a file of lm-eval, EvalPlus, inspect_ai or OpenAI, or gold for '
            "the gold answers."
        ),
    ],
    data: Data = None,
    split: Annotated[str | None, typer.Option(help="Split of the rows, if it is not the evaluated one.")] = None,
    csv: Annotated[
        Path | None, typer.Option(help="CSV, a line for each text. The default is OUTPUTS.scores.csv or TASK.gold.csv.")
    ] = None,
    filter_name: Annotated[str | None, typer.Option("--filter", help="Another rule that extracts the answer.")] = None,
    allow_partial: Annotated[bool, typer.Option(help="Leave rows without a text out of the score.")] = False,
    workers: Workers = None,
    sandbox: Sandbox = "auto",
    as_json: Json = False,
) -> None:
    """Judge texts from anywhere by the rules of a task."""
    from refusion_eval.benchmarks import get_task
    from refusion_eval.results.render import csv_text
    from refusion_eval.scoring import score as scoring
    from refusion_eval.scoring.outputs import read_outputs
    from refusion_eval.store.atomic_write import prepare_output, write_output

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
    scores = scoring.score_texts(
        benchmark, rows, texts, filter_name=filter_name, workers=workers, sandbox=sandbox, kept=kept
    )
    cells = scoring.score_cells(scores, allow_partial=allow_partial)
    write_output(target, csv_text(scoring.COLUMNS, cells, line_end="\r\n"))
    kept.remove()
    if as_json:
        print_json(scoring.COLUMNS, cells)
        return
    name = f"{'mini ' if of_task.mini else ''}{benchmark.name} (filter {filter_name or benchmark.default_filter})"
    tell("\n".join(scoring.summary_lines(name, benchmark, scores, allow_partial=allow_partial)))
    print(f"  one line a text: {target}")
