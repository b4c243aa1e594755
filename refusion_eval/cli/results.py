import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from refusion_eval import cli
from refusion_eval.cli import parameters
from refusion_eval.config import check_keys, unknown_key
from refusion_eval.errors import ConfigError
from refusion_eval.paths import EMBEDDED
from refusion_eval.report import leaderboard as boards
from refusion_eval.report.assemble import page
from refusion_eval.report.collect import collect
from refusion_eval.report.frames import Frame, frames, play
from refusion_eval.report.replay import Spell, Speller, replay_of
from refusion_eval.report.sample import find_sample, sample_frames, speller_of
from refusion_eval.results import compare as comparing
from refusion_eval.results import gate
from refusion_eval.results.measured import read_measurements, run_measurements
from refusion_eval.results.measurement import notes_of
from refusion_eval.results.published import read_published
from refusion_eval.results.render import Table, csv_text
from refusion_eval.results.results_file import measurement_cells
from refusion_eval.results.seeds import means_over_seeds
from refusion_eval.results.steps import read_steps, steps_cells, steps_table
from refusion_eval.results.tables import SUMMARY_COLUMNS, speed_cells, speed_rows, speed_table, summary, summary_table
from refusion_eval.runs.model_args import parse_model_args
from refusion_eval.store.atomic_write import write_output
from refusion_eval.store.run_files import RUN_JSON
from refusion_eval.store.run_store import Run

# The files of models and of matplotlib load slowly, so they are imported inside the functions that need them.

ANSWERS = 8  # the table of answers
NUM_CASES = 20  # items that the case study tries
WIDE = 110  # columns of a terminal that has room for the intervals of claims

# For a prompt of the user on the embedded model: as short as its texts, eight slots to choose from in every block.
REPLAYED: dict[str, Any] = {"gen_length": 96, "slot_size": 4, "block_size": 32, "tau_slot": 0.6, "tau_token": 0.4}

Margin = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Points by which the score of a sweet spot (figures 4, 8, claims P15 to P18) may be worse. Default: 2.",
    ),
]
Runs = Annotated[list[Path], typer.Argument(help="Run directories, finished or not.")]


def table(
    run_dirs: Annotated[list[Path], typer.Argument(help="Run directories. Speed-up needs the baseline's among them.")],
    csv: parameters.Csv = None,
    markdown: parameters.Markdown = None,
    latex: parameters.Latex = None,
    baseline: parameters.Baseline = None,
    metrics: Annotated[
        str, typer.Option(help="Columns, separated by commas: accuracy, tps, tpf, speedup. The default is all.")
    ] = "",
    as_json: parameters.Json = False,
) -> None:
    """Print the table of one or more runs. It has accuracy, TPS, TPF and speed-up, each with its interval.

    Runs that differ in their seed only have a line of means over the seeds.
    """
    columns = parameters.names_of(metrics)
    check_keys(columns, [column.metric for column in SUMMARY_COLUMNS], "--metrics", what="metric")
    cli.prepare(csv, markdown, latex)
    figures = run_measurements(run_dirs, baseline=baseline, hash_records=True)
    figures += means_over_seeds(figures)
    shown, cells = summary_table(summary(figures), columns), measurement_cells(figures)
    cli.show(shown, cells, as_json=as_json, csv=csv, markdown=markdown, latex=latex)


def compare(
    before: Annotated[Path, typer.Argument(help="Run directory A.")],
    after: Annotated[Path, typer.Argument(help="Run directory B.")],
    common_items: Annotated[
        bool, typer.Option("--common-items", help="If the runs hold different items, compare those that both hold.")
    ] = False,
    filter_name: Annotated[
        str | None, typer.Option("--filter", help="Compare by this answer filter, which rescore judged both runs with.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Also write a CSV with one row for each task.")] = None,
    items: Annotated[Path | None, typer.Option(help="Also write a CSV with one row for each item.")] = None,
    markdown: parameters.Markdown = None,
    latex: parameters.Latex = None,
    fail_if: parameters.FailIf = None,
    junit: parameters.Junit = None,
    as_json: parameters.Json = False,
) -> None:
    """Compare two runs item by item. It shows the difference with its interval, flips, settings and speed.

    For CI, `--fail-if "accuracy < -2 (p < 0.05)"` fails a loss of more than 2 points that is no chance.
    """
    conditions = gate.comparison_conditions(fail_if or ())
    cli.prepare(csv, items, markdown, latex, junit)
    comparison = comparing.compare_runs(before, after, common_items=common_items, filter_name=filter_name)
    shown, cells = comparing.comparison_table(comparison), comparing.comparison_cells(comparison)
    verdicts = gate.verdicts_of_comparison(conditions, cli.objects(*cells), comparison.not_compared)
    failures = gate.failed(verdicts) if fail_if else None
    if junit is not None:
        write_output(junit, gate.junit(verdicts))
    cli.show(shown, cells, as_json=as_json, csv=csv, latex=latex, failures=failures)
    if not as_json:
        cli.tell("\n".join(comparing.details(comparison)))
    if items is not None:
        write_output(items, csv_text(*comparing.item_cells(comparison)))
    if markdown is not None:
        write_output(markdown, comparing.comparison_markdown(comparison))
    if failures:
        raise typer.Exit(cli.EXIT_FAILED)


def speed(
    results: Annotated[list[Path], typer.Argument(help="Run directories, all of one machine, or results CSV files.")],
    csv: parameters.Csv = None,
    markdown: parameters.Markdown = None,
    baseline: parameters.Baseline = None,
    concurrency: Annotated[
        bool, typer.Option("--concurrency", help="Throughput and latency by the number of requests at once instead.")
    ] = False,
    steps: Annotated[
        bool, typer.Option("--steps", help="Where forwards go instead, by block, part of the response and draft.")
    ] = False,
    as_json: parameters.Json = False,
) -> None:
    """Print the breakdown of speed. It has forwards/s, tokens per forward, memory limit, prefill and both AR loops."""
    if concurrency + steps + (baseline is not None) > 1:
        raise ConfigError("--baseline, --concurrency and --steps exclude each other; give one of them")
    cli.prepare(csv, markdown)
    if concurrency:
        cli.show_load(results, as_json=as_json, csv=csv, markdown=markdown)
        return
    if steps:
        found = read_steps(results)
        cli.show(steps_table(found), steps_cells(found), as_json=as_json, csv=csv, markdown=markdown)
        return
    rows = speed_rows(read_measurements(results, baseline=baseline))
    cli.show(speed_table(rows), speed_cells(rows), as_json=as_json, csv=csv, markdown=markdown)


def report(
    run_dirs: Runs,
    out: Annotated[Path, typer.Option(help="File of the page, which needs no other file and no network.")] = Path(
        "report.html"
    ),
    baseline: parameters.Baseline = None,
    data: parameters.Data = None,
) -> None:
    """Write one HTML page about runs. It has figures, frontiers, and every sample with each step of its decoding."""
    from refusion_eval.cli.sources import FoundSources
    from refusion_eval.paper.style import page_look

    cli.log_to_stderr()
    cli.prepare(out)
    collected = collect(run_dirs, FoundSources(data), baseline=baseline, look=page_look)
    for note in collected.notes:
        cli.say(f"note: {note}")
    write_output(out, page(collected.index, collected.chunks))
    print(f"{out} ({out.stat().st_size / 2**20:.1f} MiB)")


def leaderboard(
    results: Annotated[
        list[Path],
        typer.Argument(help="Run directories, results CSV files, and JSON files of export --format every-eval-ever."),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the page and its files, which need no network.")] = Path("site"),
    baseline: parameters.Baseline = None,
) -> None:
    """Write a static leaderboard. It has accuracy, TPS and TPF by task and machine, and published figures apart."""
    from refusion_eval.paper.style import page_look

    cli.log_to_stderr()
    cli.prepare(out / "index.html")
    placed = boards.read_placed(results, baseline=baseline)
    published = read_published("published.csv")
    texts = {
        "index.html": page(boards.leaderboard(placed, look=page_look), {}),
        "figures.csv": csv_text(*measurement_cells([one.measurement for one in placed])),
        "published.csv": csv_text(list(published[0]), [list(figure.values()) for figure in published]),
    }
    for name, text in texts.items():
        write_output(out / name, text)
        print(out / name)


def replay(
    run_dir: Annotated[Path | None, typer.Argument(help="Run directory, finished or not.")] = None,
    task: Annotated[str | None, typer.Option(help="Task or benchmark. The default is the first of the run.")] = None,
    sample: Annotated[
        str | None, typer.Option(help="Id of the item in the benchmark. The default is the first item.")
    ] = None,
    number: Annotated[int | None, typer.Option(min=0, help="Number of the sample, if the item has several.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write an animation, x.gif or x.png, instead of playing on the terminal.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.02, max=60, help="Time that each step is shown.")] = 0.5,
    prompt: Annotated[
        str | None, typer.Option(help="Decode this prompt with the embedded ReFusion model instead of reading a run.")
    ] = None,
) -> None:
    """Show step by step how one sample was decoded. It plays on the terminal or becomes an animated picture."""
    from refusion_eval.report.picture import check_format, write_animation

    if (run_dir is None) == (prompt is None):
        raise ConfigError("name one of the two, a run directory or a --prompt: refusion-eval replay RUN --task gsm8k")
    if prompt is not None and (task, sample, number) != (None, None, None):
        raise ConfigError("--task, --sample and --number choose from a run; leave them out with --prompt")
    if out is not None:
        check_format(out)
        cli.prepare(out)
    cli.log_to_stderr()
    if run_dir is None:
        title, shown = _from_prompt(prompt)
    else:
        run, decoded = find_sample(run_dir, task, sample, number, needs="steps")
        title = f"{run.manifest.system} · {decoded.key.task} · {decoded.item_id}"
        shown = list(sample_frames(decoded, lambda: _spell(run)))
    if out is None:
        play(shown, cli.console(), title, seconds)
        return
    write_animation(shown, out, title, seconds=seconds)
    print(f"{out} ({len(shown)} frames, {out.stat().st_size / 2**10:.0f} KiB)")


def _spell(run: Run) -> Spell | None:
    from refusion_eval.cli.sources import FoundSources

    return FoundSources(None).spell(run)


def _from_prompt(prompt: str | None) -> tuple[str, list[Frame]]:
    from refusion_eval import api
    from refusion_eval.runs.system import System

    system = System(parse_model_args({"pretrained": EMBEDDED, "decoder": "refusion"}))
    turn = [{"role": "user", "content": prompt or ""}]
    ids = system.model.tokenizer.encode(system.model.tokenizer.render_chat(turn))
    cli.LOGGER.info("decoding the prompt; its steps are shown once the text is there ...")
    decoded = api.generate(system.model, ids, "refusion", **REPLAYED)
    steps = replay_of(decoded.trace, slot_size=REPLAYED["slot_size"])
    return "ReFusion · embedded model", list(frames(steps, Speller(system.backend.detokenizer.spelled)))


def export(
    run_dirs: Runs,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File of JSON lines, which go to standard output without it. Folder of the other formats, by default "
            "export."
        ),
    ] = None,
    form: Annotated[
        Literal["jsonl", "every-eval-ever", "hf", "lm-eval", "csv", "parquet"],
        typer.Option(
            "--format",
            help="jsonl: samples as JSON lines; every-eval-ever: files of that database; hf: model card and "
            ".eval_results of the Hugging Face hub; lm-eval: its results and sample files; csv and parquet: figures "
            "and samples.",
        ),
    ] = "jsonl",
    data: parameters.Data = None,
    baseline: parameters.Baseline = None,
) -> None:
    """Write results in the formats of other tools. By default every sample becomes a line of JSON.

    The keys of these lines are the columns of `refusion_eval.results.load`. Texts of GPQA are in no format.
    """
    from refusion_eval.exports.flat import json_lines

    if form != "jsonl":
        cli.log_to_stderr()
        cli.say_extents(run_dirs)
        for path in _write_export(form, run_dirs, out or Path("export"), data, baseline):
            cli.tell(str(path))
        return
    cli.refuse_unused("the other formats, which hold speed-ups", baseline=baseline)
    cli.prepare(out)
    cli.say_extents(run_dirs)
    lines = json_lines(run_dirs)
    if out is None:
        sys.stdout.writelines(lines)
    else:
        written = list(lines)
        write_output(out, "".join(written))
        cli.tell(f"{out} ({len(written)} samples)")


def _write_export(form: str, run_dirs: list[Path], out: Path, data: Path | None, baseline: str | None) -> list[Path]:
    from refusion_eval.exports import every_eval_ever, flat, hub, lm_eval
    from refusion_eval.exports.source import read_exported

    cli.prepare(out / "figures.csv")
    if form in ("csv", "parquet"):
        write_files = flat.write_csv_files if form == "csv" else flat.write_parquet_files
        return write_files(run_dirs, out, baseline)
    if form == "hf":
        return hub.write(read_exported(run_dirs, baseline=baseline), out)
    from refusion_eval.cli.sources import FoundSources

    write = every_eval_ever.write if form == "every-eval-ever" else lm_eval.write
    return write(read_exported(run_dirs, FoundSources(data), baseline=baseline), out)


def plot(
    figure: Annotated[
        str, typer.Argument(help="figure1, 3, 4, 5, 6, 7, 8 or 9; or list, which says what each is drawn from.")
    ],
    sources: Annotated[
        list[Path] | None, typer.Argument(help="Sources of the figure, or the CSV that was written with it before.")
    ] = None,
    out: parameters.Out = Path("figures"),
    task: Annotated[
        str | None, typer.Option(help="Benchmark. Default: the sweep's, else mbpp; figures 5 and 9: the run's first.")
    ] = None,
    item: Annotated[
        str | None, typer.Option(help="Item of figures 5 and 9. Default: the right answer with the most steps.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Figures 5 and 9: let this ReFusion (folder, hub id or embedded) answer the first 20 items under the "
            "settings of the paper's case study (--set changes them), into OUT/case_study, and draw from that."
        ),
    ] = None,
    settings: parameters.Settings = None,
    data: parameters.Data = None,
    width: Annotated[
        Literal["one", "two"] | None,
        typer.Option(help="Columns of a paper that the figure takes. Default: as many as it needs."),
    ] = None,
    margin: Margin = None,
) -> None:
    """Draw the paper's figures beside measured ones. The files are CSV, PNG, PDF, and the caption."""
    from refusion_eval.paper.figures import FIGURES, rows_of, write_figure
    from refusion_eval.paper.points import TASK

    if figure == "list":
        for name, entry in FIGURES.items():
            print(f"{name}  {entry.shows}; from {entry.sources}")
        return
    name = figure if figure.startswith("figure") else f"figure{figure}"
    if name not in FIGURES:
        raise unknown_key(figure, FIGURES, what="figure")
    cli.log_to_stderr()
    cli.prepare(out / f"{name}.csv")
    if FIGURES[name].read is not None:
        cli.refuse_unused("figures 5 and 9", item=item)
    if model is None:
        cli.refuse_unused("--model", set=settings, data=data)
    else:
        if FIGURES[name].read is not None or sources:
            raise ConfigError("--model makes the run that figures 5 and 9 are drawn from; name no sources with it")
        task = task or TASK
        sources = [_case_study(model, task, cli.read_pairs(settings), data, out / "case_study")]
    rows = rows_of(name, sources or [], task)
    if rows is None:
        rows = _moments(name, sources or [], task, item)
    cli.say_extents([source for source in sources or [] if (source / RUN_JSON).is_file()])
    for path in write_figure(name, rows, out, width, margin):
        cli.tell(str(path))


def _case_study(model: str, task: str, settings: dict[str, str], data: Path | None, run_dir: Path) -> Path:
    """Runs the first items of a task by the paper's algorithm; what is not set is as in the paper's case study."""
    from refusion_eval.evaluation.loop import evaluate
    from refusion_eval.evaluation.tasks import task_names
    from refusion_eval.paper.studies import CASE_STUDY

    given = {"pretrained": model, "decoder": "refusion", "run_dir": str(run_dir), **CASE_STUDY, "fuse": False}
    args = parse_model_args({**given, "data_dir": None if data is None else str(data), **settings})
    evaluate(args, task_names([task], model, data=data), limit=NUM_CASES)
    return run_dir


def _moments(name: str, sources: list[Path], task: str | None, item: str | None) -> list:
    """The rows of figure 5 or 9: the text of one sample at one or several steps of its decoding."""
    from refusion_eval.paper.moments import generation_order, longest_sample, step_by_step

    if len(sources) != 1:
        raise ConfigError(f"{name} shows one sample; name one run directory")
    if item is None:
        task, item = longest_sample(sources[0], task)
    run, sample = find_sample(sources[0], task, item)
    make = generation_order if name == "figure5" else step_by_step
    return list(make(run.manifest.system, sample, speller_of(sample, _spell(run))))


def paper_table(
    table: Annotated[
        str, typer.Argument(help="Tables by number, 1 to 7, separated by commas, or all; 8 with --item, from runs.")
    ],
    results: parameters.Results = None,
    out: parameters.Out = Path("tables"),
    baseline: parameters.Baseline = None,
    paper: Annotated[Literal["v1", "v2"], typer.Option(help="Version of the paper whose Table 2 is printed.")] = "v2",
    item: Annotated[str | None, typer.Option(help="Table 8: the benchmark's id of the problem.")] = None,
    task: Annotated[str | None, typer.Option(help="Table 8: task or benchmark of the problem.")] = None,
    data: parameters.Data = None,
    rows: Annotated[
        str | None,
        typer.Option(help="Tables 1 to 4: labels of the systems to show, in this order, separated by commas."),
    ] = None,
    row: Annotated[
        str | None, typer.Option(help="Tables 1 to 4: print one measured system as lines of LaTeX; no file is written.")
    ] = None,
    intervals: Annotated[
        bool, typer.Option("--intervals/--no-intervals", help="Whether LaTeX shows intervals.")
    ] = True,
) -> None:
    """Write the paper's tables beside measured figures. The files are CSV, Markdown and LaTeX.

    Table 8 has the answers of several runs to one problem side by side.
    """
    from refusion_eval.paper import tables

    names = [str(number) for number in tables.NUMBERS] if table == "all" else parameters.names_of(table)
    numbers = [int(name) for name in (name.removeprefix("table") for name in names) if name.isdecimal()]
    if not numbers or len(numbers) < len(names) or not set(numbers) <= {*tables.NUMBERS, ANSWERS}:
        raise ConfigError(f"{table!r}: name tables by number, 1 to {ANSWERS}, or all")
    if (ANSWERS in numbers) != (item is not None) or (ANSWERS in numbers and numbers != [ANSWERS]):
        raise ConfigError("Table 8 shows one problem: paper-table 8 RUN RUN RUN --item ID; other tables take no --item")
    if row is None:
        cli.prepare(out / f"table{numbers[0]}.csv")
    else:
        cli.refuse_unused("tables that are written, without --row", rows=rows)
    if item is not None:
        made = [_answers(results or [], task, item, data)]
    else:
        cli.refuse_unused("Table 8", task=task, data=data)
        measured = read_measurements(results or [], baseline=baseline)
        systems = parameters.names_of(rows or "") if row is None else [row]
        made = [tables.paper_table(number, measured, paper, systems) for number in numbers]
        made = [one.without_empty_columns() for one in made] if rows else made
    for made_table in made:
        if row is None:
            for path in made_table.write(out, intervals=intervals):
                cli.tell(str(path))
        else:
            _print_row(made_table, row, intervals)


def _print_row(table: Table, name: str, intervals: bool) -> None:
    """Prints score and throughput of a measured system, without the columns of labels."""
    lines = [line for line in table.lines if line.origin == "measured"]
    if not lines:
        raise ConfigError(f"{name} was not measured; name its run or results CSV")
    for line in lines:
        label, _, _, *figures = line.shown
        print("\n".join(table.latex_lines(replace(line, cells=(label, *figures), num_repeated=0), intervals=intervals)))


def _answers(run_dirs: list[Path], task: str | None, item: str, data: Path | None) -> Table:
    from refusion_eval.cli.sources import FoundSources
    from refusion_eval.paper.answers import answers_table, read_answers

    if not run_dirs:
        raise ConfigError("Table 8 is made from runs; name their directories")
    answers = read_answers(run_dirs, task, item)
    question = FoundSources(data).asked(answers[0].run, answers[0].sample)
    return answers_table(answers, question.prompt, question.gold)


def claims(
    results: parameters.Results = None,
    out: Annotated[Path | None, typer.Option(help="Folder for claims.csv, averages.csv and claims.md.")] = None,
    only_measured: Annotated[
        bool, typer.Option("--only-measured", help="Show only the claims that these results have figures for.")
    ] = False,
    margin: Margin = None,
    as_json: parameters.Json = False,
) -> None:
    """Judge the paper's claims by its tables and measured figures. Every average of a speed-up is shown."""
    from refusion_eval.paper.claims import averages_cells, averages_table, claims_cells, claims_table, write_claims
    from refusion_eval.paper.formulas import MARGIN
    from refusion_eval.paper.judge import judge_all
    from refusion_eval.paper.studies import sort_sources

    cli.prepare(out and out / "claims.csv")
    runs, of_studies = sort_sources(results or [])
    measured = [*read_measurements(runs), *of_studies]
    margin = MARGIN if margin is None else margin
    judged, averages = judge_all(measured, margin)
    known, narrow = notes_of(measured), cli.console().width < WIDE
    if out is not None:
        write_claims(judged, averages, out, known, margin)
    if only_measured:
        judged = [claim for claim in judged if claim.measured.is_defined or claim.mini.is_defined]
        averages = [average for average in averages if average.measured.is_defined or average.mini.is_defined]
    if as_json:
        cells = {"claims": claims_cells(judged), "averages": averages_cells(averages)}
        cli.print_value({name: cli.objects(*of_name) for name, of_name in cells.items()} | {"notes": known})
        return
    of_averages = [averages_table(averages, narrow=narrow)] if averages else []
    cli.show([claims_table(judged, known, margin=margin, brief=True, narrow=narrow), *of_averages])
