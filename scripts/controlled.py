"""The paper's controlled comparison (Sec. 5.3, Table 2) on SmolLM2-135M-Instruct: `python scripts/controlled.py`.

    python scripts/controlled.py --data DIR --work-dir runs/smollm2            # all of it; the same command continues
    python scripts/controlled.py --data DIR --work-dir runs/smollm2 --dry-run  # prints the commands
    python scripts/controlled.py --data DIR --pack carry                       # what has to travel to another machine

Five systems start from the same weights and take the same steps on the same samples. The rows are those of the training
splits in DIR, asked and answered in the form of the benchmarks; no row whose question a test row asks is among them.
Some rows of each split are held out, and each system decodes them with as many settings as every other (AR-SFT has only
one). It then decodes the test sets with one setting: the one with most tokens a forward among those near its best
accuracy. With --seconds, everything ends in time: what is finished stays, and what was begun continues from its last
checkpoint or answer. The trainings come first, in the order of RECIPES.
"""

import argparse
import io
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from miniature.frontier import choices  # noqa: E402
from miniature.systems import System, equally_tuned  # noqa: E402
from refusion_eval.benchmarks import BENCHMARKS, Task  # noqa: E402
from refusion_eval.errors import ConfigError, DataError, RefusionEvalError  # noqa: E402
from refusion_eval.models.packaged import MODELS, cache_folder, packaged_file  # noqa: E402
from refusion_eval.results.metric_list import SCORES  # noqa: E402

RECIPES = ("ar_sft", "refusion", "bd3lm", "idlm", "llada")
BACKBONE, MODEL = "SmolLM2-135M-Instruct", "smollm2"
SPLIT = "train"
# Where the training split of a benchmark is, and its licence.
SOURCES = {
    "gsm8k": "openai/gsm8k on the Hugging Face hub, or github.com/openai/grade-school-math; MIT",
    "math": "EleutherAI/hendrycks_math on the hub, or the archive of github.com/hendrycks/math; MIT, but the right to "
    "the problems is disputed, so do not publish them",
    "mbpp": "google-research-datasets/mbpp (full) on the hub, or github.com/google-research/google-research; CC BY 4.0",
}
QUESTIONS = {"gsm8k": "question", "math": "problem", "mbpp": "text"}  # columns
# Each by the name of its recipe. The texts are longer than those of the mini tasks, and so are the blocks.
SYSTEMS = tuple(
    replace(system, model={"autoregressive_sft": "ar_sft"}.get(system.model, system.model))
    for system in equally_tuned(refusion_block=64, llada_blocks=(16, 32))
    if system.model != "wedlm"
)


# Forwards per second on a GPU that the estimate of --check assumes, of the least and of the most.
ASSUMED_RATES = (200, 1000)


class OutOfTimeError(RefusionEvalError):
    """The seconds of --seconds are over."""


def key_of(system: System) -> str:
    """The name of a system in files and folders."""
    return re.sub(r"\W+", "_", system.name.lower()).strip("_")


def label_of(system: System) -> str:
    """The name of a system in tables, without its variant, which tables add; no published system has it."""
    return f"{BACKBONE.partition('-')[0]} {system.name.partition(',')[0]}"


def normalised(question: str) -> str:
    """Letters and digits in lower case: the form in which questions are compared."""
    return " ".join(re.findall(r"\w+", question.casefold()))


def rows_of(task: str, data: Path | None, split: str) -> list[dict[str, Any]]:
    """The rows of a split; raises DataError that says where the training split is, if it is missing."""
    try:
        return Task(BENCHMARKS[task]).rows(data, split)
    except DataError as error:
        if split != SPLIT:
            raise
        raise DataError(
            f"{error}. Source and licence of the {SPLIT} split of {task}: {SOURCES[task]}. To train without it, name "
            f"the others: --train {','.join(name for name in SOURCES if name != task)}"
        ) from error


def write_rows(data: Path | None, tasks: Sequence[str], held_out: int, seed: int, work: Path) -> None:
    """Writes train.jsonl, held_out/TASK/test.jsonl and rows.json, which says what they were made from.

    Args:
        data: folder with the benchmarks; None for the places that `run` looks in.
        tasks: benchmarks whose training splits are used.
        held_out: number of rows of each split that are not trained on.
        seed: seed of their draw, and of the order of the others.
        work: folder of the files.

    Raises:
        DataError: a split is missing, or has no more rows than are held out.
        ConfigError: the folder has rows that were made in another way.
    """
    made_from = {"train": list(tasks), "held_out": held_out, "seed": seed}
    facts = work / "rows.json"
    if facts.exists():
        if (before := json.loads(facts.read_text(encoding="utf-8"))["made_from"]) != made_from:
            raise ConfigError(f"{facts} has rows of {before}, and asked for are {made_from}; name another --work-dir")
        return
    tests = {normalised(row[QUESTIONS[task]]) for task in SOURCES for row in rows_of(task, data, "test")}
    trained: list[dict[str, str]] = []
    counts: dict[str, dict[str, int]] = {}
    for task in tasks:
        prompts, rows, seen = BENCHMARKS[task].ours, rows_of(task, data, SPLIT), set(tests)
        free = []
        for row in rows:
            question = normalised(row[QUESTIONS[task]])
            if question not in seen:  # neither a test row's nor an earlier one's
                seen.add(question)
                free.append(row)
        if len(free) <= held_out:
            raise DataError(
                f"{task} has {len(free)} {SPLIT} rows of its own; hold out fewer than --held-out {held_out}"
            )
        random.Random(seed).shuffle(free)
        folder = work / "held_out" / BENCHMARKS[task].folder
        folder.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(row) + "\n" for row in free[:held_out])
        (folder / "test.jsonl").write_text(lines, encoding="utf-8")
        trained += [{"query": prompts.user(row), "response": prompts.gold_text(row)} for row in free[held_out:]]
        left_out = len(rows) - len(free)
        counts[task] = {"rows": len(rows), "as_tests_or_twice": left_out, "trained": len(free) - held_out}
    random.Random(seed).shuffle(trained)
    (work / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in trained), encoding="utf-8")
    facts.write_text(json.dumps({"made_from": made_from, "counts": counts}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(counts), flush=True)


def trained_systems(work: Path) -> list[System]:
    """The systems whose training is finished."""
    return [system for system in SYSTEMS if (work / system.model / "model").is_dir()]


def entry(system: System, work: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """A system as the files of sweeps and protocols have it."""
    checkpoint = {"pretrained": str((work / system.model / "model").resolve()), "decoder": system.decoder}
    return {"arguments": checkpoint | {"system": label_of(system), "backbone": BACKBONE}, "settings": settings}


def write_yaml(path: Path, content: dict[str, Any]) -> None:
    """Writes a file of settings."""
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def write_sweep(path: Path, systems: Sequence[System], tasks: Sequence[str], gen_length: int) -> None:
    """Writes the sweep of the held-out rows, in which each setting of a system is a system of its own."""
    points = {
        f"{key_of(system)}-{number}": entry(system, path.parent, {"gen_length": gen_length} | dict(point))
        for system in systems
        for number, point in enumerate(system.grid)
    }
    write_yaml(path, {"tasks": list(tasks), "systems": points})


def chosen_settings(results: pandas.DataFrame, systems: Sequence[System]) -> dict[str, dict[str, Any]]:
    """The setting of each system by the rule of `miniature.frontier`, over all held-out rows.

    Args:
        results: sweep.csv, whose accuracies are averaged over the tasks, and whose tokens and forwards are summed.
        systems: the systems of the sweep.
    """
    scores = results[results.metric.isin(SCORES) & results.task.notna()]
    rows = []
    for system in systems:
        for number, point in enumerate(system.grid):
            found = scores[scores.run_id.str.startswith(f"{key_of(system)}-{number}-")]
            found = found[found.num_tasks.fillna(1) == 1]  # without the mean over tasks
            rows.append(
                {
                    "system": key_of(system),
                    "task": "held out",
                    "settings": json.dumps(dict(point)),
                    "accuracy": found.value.mean(),
                    "tpf": found.tokens.sum() / found.forwards.sum(),
                }
            )
    return {row.system: json.loads(row.settings) for row in choices(pandas.DataFrame(rows))}


def write_protocol(work: Path, given: argparse.Namespace) -> Path:
    """Writes the protocol of the test sets, with the chosen settings of the finished systems."""
    systems = trained_systems(work)
    settings = chosen_settings(pandas.read_csv(work / "sweep" / "sweep.csv"), systems)
    entries = {
        key_of(system): entry(system, work, {"gen_length": given.gen_length} | settings[key_of(system)])
        for system in systems
    }
    path = work / "comparison.yaml"
    content = {
        "about": f"Table 2 on {BACKBONE}: settings chosen on held-out training rows.",
        "tasks": list(SOURCES),
        "rounds": 1,
        "systems": entries,
    }
    if given.limit is not None:
        content["limit"] = given.limit
    write_yaml(path, content)
    return path


def cost_of_decoding(given: argparse.Namespace) -> str:
    """How many answers are asked for after the trainings, and at an assumed speed how long that takes."""
    held_out = sum(len(system.grid) for system in SYSTEMS) * given.held_out * len(given.train)
    tests = len(SYSTEMS) * sum(len(rows_of(task, given.data, "test")[: given.limit]) for task in SOURCES)
    forwards = (held_out + tests) * given.gen_length
    low, high = ASSUMED_RATES
    slow, fast = forwards / low / 60, forwards / high / 60
    return (
        f"decoding: {held_out:,} answers to held-out rows and {tests:,} to test rows, each of at most "
        f"{given.gen_length} tokens and as many forwards; they take at most {fast:.0f} to {slow:.0f} minutes at an "
        f"assumed {high:,} to {low:,} forwards a second, and less with a smaller --limit, --held-out or --gen-length"
    )


def training_command(recipe: str, given: argparse.Namespace) -> list[str]:
    """The command that trains a system, or continues its training."""
    work = given.work_dir
    paths = {"data.files": work / "train.jsonl", "data.cache_dir": work / "tokens", "output.run_dir": work / recipe}
    settings = [f"{name}={json.dumps(str(path))}" for name, path in paths.items()]  # as YAML reads any path
    settings += [f"optimisation.max_steps={given.steps}"] if given.steps else []
    settings += given.overrides
    return ["train", "--config", f"{MODEL}_{recipe}", *(word for one in settings for word in ("--set", one))]


def commands(given: argparse.Namespace) -> Iterator[list[str]]:
    """The commands behind the rows, in order; what they need is written before each, but not in a dry run."""
    work, data = given.work_dir, [] if given.data is None else ["--data", str(given.data)]
    for recipe in RECIPES:
        yield training_command(recipe, given) + (["--check"] if given.check else [])
    if given.check:
        return
    systems = list(SYSTEMS) if given.dry_run else trained_systems(work)
    if not given.dry_run:
        write_sweep(work / "settings.yaml", systems, given.train, given.gen_length)
    yield ["sweep", str(work / "settings.yaml"), "--out", str(work / "sweep"), "--data", str(work / "held_out")]
    if not given.dry_run:
        write_protocol(work, given)
    out = work / f"protocol_{len(systems)}"  # with other systems the protocol is another one
    yield ["protocol", "run", str(work / "comparison.yaml"), "--out", str(out), *data]
    runs = [str(out / "runs" / key_of(system)) for system in systems]
    labels = dict.fromkeys(map(label_of, systems))
    yield ["table", *runs, "--markdown", str(out / "all.md")]
    paper = ["Qwen3-8B (Retrained)", "LLaDA (Retrained)", "BD3-LMs (Retrained)", "ReFusion (Retrained)"]
    yield ["paper-table", "2", *runs, "--rows", ",".join([*paper, *labels]), "--out", str(out / "tables")]
    yield ["plot", "figure1", *runs, "--out", str(out / "figures")]
    pair = [f"{out}/runs/{key_of(system)}" for system in systems if system.model == "refusion"]
    if pair:
        verifier = out / "tables" / "verifier"
        yield ["compare", *pair, "--csv", f"{verifier}.csv", "--markdown", f"{verifier}.md"]


def carry_out(command: Sequence[str], end: float | None) -> None:
    """Carries out one command in a process of its own, which is stopped when the time is over.

    Args:
        command: words behind `refusion-eval`.
        end: value of `time.monotonic` at which everything has to end; None for never.

    Raises:
        OutOfTimeError: the command was stopped.
        ConfigError: it failed.
    """
    said = f"refusion-eval {shlex.join(command)}"
    started = time.monotonic()
    print(f"$ {said}", flush=True)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, "-m", "refusion_eval", *command],
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        status = process.wait(None if end is None else max(end - started, 0))
    except subprocess.TimeoutExpired:
        raise OutOfTimeError(f"the time is over during: {said}; the same command continues") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    print(f"{time.monotonic() - started:.0f} s", flush=True)
    if status:
        raise ConfigError(f"{said} ended with status {status}; what it said is above")


def pack(folder: Path, data: Path | None, wheels: Path | None, part_mib: int) -> list[Path]:
    """Writes code, data, wheels and the packaged weights as one archive in parts, each of at most `part_mib` MiB.

    On the other machine `cat FOLDER/part-* | tar x -C PLACE` makes `code`, `data`, `wheels` and `cache`, which
    `XDG_CACHE_HOME=PLACE/cache` names.
    """
    weights = packaged_file(MODEL)
    target = f"cache/{cache_folder('packages').parent.name}/packages/{MODELS[MODEL].sha256}/{weights.name}"
    whole = io.BytesIO()

    def of_code(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if re.search(r"__pycache__|/embedded/.*(safetensors|loss\.csv)$", info.name) else info

    with tarfile.open(fileobj=whole, mode="w") as archive:
        for name in ("refusion_eval", "miniature", "scripts", "tasks", "results/published"):
            if (ROOT / name).exists():
                archive.add(ROOT / name, f"code/{name}", filter=of_code)
        for task in SOURCES:
            for split in (SPLIT, "test"):
                for ending in ("jsonl", "jsonl.gz"):
                    if data is not None and (path := data / task / f"{split}.{ending}").is_file():
                        archive.add(path, f"data/{task}/{path.name}")
        if wheels is not None:
            archive.add(wheels, "wheels")
        archive.add(weights, target)
    folder.mkdir(parents=True, exist_ok=True)
    size, paths = part_mib * 2**20, []
    for number, start in enumerate(range(0, len(whole.getbuffer()), size)):
        paths.append(folder / f"part-{number:02}")
        paths[-1].write_bytes(whole.getbuffer()[start : start + size])
    return paths


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python scripts/controlled.py", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--data", type=Path, help="folder with BENCHMARK/SPLIT.jsonl[.gz]; default: REFUSION_EVAL_DATA, then the hub")
    add("--work-dir", type=Path, default=Path("runs/smollm2"), help="folder of all files (default: %(default)s)")
    add("--train", default=",".join(SOURCES), help="benchmarks to train on (default: %(default)s)")
    add("--held-out", type=int, default=40, help="rows of each split to choose settings on (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of the held-out rows and of the order (default: %(default)s)")
    add("--steps", type=int, help="steps of each training instead of the recipes'")
    add("--set", action="append", default=[], dest="overrides", help="a setting of all five trainings")
    add("--gen-length", type=int, default=256, help="longest answer in tokens (default: %(default)s)")
    add("--limit", type=int, help="only the first items of each test set")
    add("--seconds", type=float, help="end after so many seconds, and keep what is finished")
    add("--check", action="store_true", help="check the five trainings, with their costs, and stop")
    add("--dry-run", action="store_true", help="print the commands, and stop")
    add("--pack", type=Path, metavar="FOLDER", help="write what has to travel to another machine, and stop")
    add("--wheels", type=Path, help="folder of wheels for --pack")
    add("--part-mib", type=int, default=60, help="size of a part of --pack (default: %(default)s)")
    given = parser.parse_args(arguments)
    given.train = given.train.split(",")
    if unknown := [name for name in given.train if name not in SOURCES]:
        parser.error(f"--train: {unknown[0]} is not one of {', '.join(SOURCES)}")
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status, 3 if the time was over."""
    given = parsed(arguments)
    end = None if given.seconds is None else time.monotonic() + given.seconds
    try:
        if given.pack is not None:
            for path in pack(given.pack, given.data, given.wheels, given.part_mib):
                print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB")
            return 0
        if not given.dry_run:
            given.work_dir.mkdir(parents=True, exist_ok=True)
            write_rows(given.data, given.train, given.held_out, given.seed, given.work_dir)
            if given.check:
                print(cost_of_decoding(given), flush=True)
        for command in commands(given):
            if given.dry_run:
                print(f"refusion-eval {shlex.join(command)}")
            elif command[0] != "train" or given.check or not (given.work_dir / command[2][8:] / "model").is_dir():
                carry_out(command, end)
    except OutOfTimeError as error:
        names = ", ".join(system.name for system in trained_systems(given.work_dir))
        print(f"{error}\ntrained: {names or 'none'}", file=sys.stderr)
        return 3
    except RefusionEvalError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
