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
        Path | None,
        typer.Option(help="CSV with one line for each text. The default is OUTPUTS.scores.csv, or TASK.gold.csv."),
    ] = None,
    filter_name: Annotated[str | None, typer.Option("--filter", help="Another rule that extracts the answer.")] = None,
    allow_partial: Annotated[bool, typer.Option(help="Leave rows without a text out of the score.")] = False,
    workers: Workers = None,
    sandbox: Sandbox = "auto",
    as_json: Json = False,
) -> None:
    """Judge texts from anywhere by the rules of a task."""
    from refusion_eval.benchmarks import get_task
    from refusion_eval.scoring import texts
    from refusion_eval.scoring.outputs import read_outputs
    from refusion_eval.scoring.verdict_file import VerdictFile
    from refusion_eval.store.atomic_write import prepare_output, write_output

    known = get_task(task)
    benchmark, rows = known.benchmark, known.rows(data, split)
    benchmark.check_gold(rows)
    ids = texts.index_rows(benchmark, rows)
    is_gold = outputs == texts.GOLD
    given = texts.gold_texts(benchmark, rows) if is_gold else read_outputs(Path(outputs), benchmark, ids)
    target = prepare_output(csv or texts.default_csv_path(task, outputs))
    kept = VerdictFile(target, f"sandbox {sandbox}")
    scores = texts.score_texts(
        benchmark, rows, given, filter_name=filter_name, workers=workers, sandbox=sandbox, kept=kept
    )
    write_output(target, texts.scores_csv(scores, allow_partial=allow_partial))
    kept.remove()
    if as_json:
        print_json(texts.COLUMNS, texts.score_cells(scores, allow_partial=allow_partial))
        return
    name = f"{'mini ' if known.mini else ''}{benchmark.name} (filter {filter_name or benchmark.default_filter})"
    tell("\n".join(texts.summary_lines(name, benchmark, scores, allow_partial=allow_partial)))
    print(f"  one line a text: {target}")
