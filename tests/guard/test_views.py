"""Texts of every view over runs of every kind, and what plans print, compared with stored ones byte by byte.

Floats in JSON are compared as in the other records of this folder. Whoever changes a text on purpose writes the records
anew (`stored.WRITE`) and says in the commit why they differ.
"""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from refusion_eval.cli import app
from refusion_eval.report.collect import collect
from refusion_eval.report.leaderboard import leaderboard, read_placed
from refusion_eval.store.manifest import Hardware
from refusion_eval.store.records import BY_FILTER, NO_ISOLATION, REFUSED, STATED, STOCK_GENERATE, ScoreRow
from refusion_eval.store.run_store import RunStore
from tests.guard.stored import check
from tests.report.conftest import LetterSources
from tests.results.conftest import run_writer, sample

CREATED = "2026-01-02T03:04:05.678901+00:00"
COMMAND = "refusion-eval run --tasks gsm8k,mbpp --run-dir here"
OTHER_MACHINE = Hardware(cpu="Other CPU", cores=2, threads=1)
SERVED = (
    {"prompt": "text", "attempts": 1, "tokens": "usage", "template": "none", "first_byte_seconds": 0.25}
    | {"completion_tokens": 6, "prompt_tokens": 9, "finish_reason": "", "drafted_tokens": 4, "accepted_tokens": 3}
    | {"prefill_seconds": 0.1, "generation_seconds": 0.3, "queue_seconds": 0.01, "dropped": ["top_k"]}
)
NO_TRACE = {"trace": None, "prefill_seconds": None}


def made(num, task="mini_gsm8k", benchmark=None, **changes):
    """Samples of so many items, each a little slower than the one before."""
    fields = {"benchmark": benchmark or task.removeprefix("mini_"), "created": CREATED, "prompt_num_tokens": 7}
    return [sample(item, task=task, seconds=0.5 + item / 100, **{**fields, **changes}) for item in range(num)]


def both_tasks(num, **changes):
    return [*made(num, **changes), *made(num, task="mini_mbpp", **changes)]


def failed(stop="", error="it broke"):
    return {**NO_TRACE, "error": error, "stop": stop}


def real(num, **changes):
    """Samples of two real benchmarks."""
    return [
        *made(num, task="refusion_gsm8k", benchmark="gsm8k", **changes),
        *made(num, task="refusion_mbpp", **changes),
    ]


AR = {"system": "AR", "decoder": "autoregressive"}
LLADA = {"system": "LLaDA", "decoder": "llada", "backbone": "GSAI-ML/LLaDA-8B-Instruct"}
SERVER = {"system": "server box:1", "decoder": "server", "settings": {"server": {"name": "vLLM", "version": "0.20"}}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Name -> run directory, a run for each thing that a view has to say of a number."""
    write_run = run_writer(tmp_path_factory.mktemp("runs"))

    def write(name, samples, right="0123", **changes):
        return write_run(name, samples, set(right), command=COMMAND.split(), **changes)

    machine = Hardware(cpu="Test CPU", cores=2, threads=1, server="http://box:1")
    several = [one for number in range(3) for one in made(4, number=number, settings={"temperature": 1.0, "seed": 1})]
    refused = [sample(8, created=CREATED, **failed(REFUSED, "too long")), sample(9, created=CREATED, **failed())]
    thoughts = made(4, num_thought_tokens=2, cut_in_thought=False, num_forced_tokens=0, settings={"thought_budget": 4})
    release = made(4, task="refusion_release_gsm8k", benchmark="gsm8k", prompts="release")
    others = [replace(one, key=replace(one.key, settings_hash="others")) for one in made(3, settings={"b": 1})]
    found = {
        "complete": write("complete", both_tasks(6), expected={"mini_gsm8k": 6, "mini_mbpp": 6}),
        "baseline": write("baseline", both_tasks(6), "01", **AR, expected={"mini_gsm8k": 6, "mini_mbpp": 6}),
        "stock": write("stock", both_tasks(6, **NO_TRACE), "01", system="Stock", decoder=STOCK_GENERATE),
        "limited": write("limited", both_tasks(3), **LLADA, expected={"mini_gsm8k": 3}, whole={"mini_gsm8k": 9}),
        "cut": write(
            "cut", made(2), system="Cut", tasks={"mini_gsm8k": "1", "mini_mbpp": "1"}, expected={"mini_gsm8k": 4}
        ),
        "early": write("early", [], tasks={"mini_gsm8k": "1"}, system="Early"),
        "errors": write("errors", [*made(4), *refused], scored=made(4)),
        "long": write("long", made(4, stop="length", prompts="other"), system="Long"),
        "served": write("served", made(4, server=SERVED, **NO_TRACE), **SERVER, hardware=machine, device="unknown"),
        "several": write("several", several, system="Several"),
        "seed1": write("seed1", made(5, settings={"seed": 1}), "012"),
        "seed2": write("seed2", made(5, settings={"seed": 2}), "01"),
        "elsewhere": write("elsewhere", made(5, settings={"seed": 3}), "0", hardware=OTHER_MACHINE, turn=None),
        "prompts": write("prompts", [*release, *made(4, task="refusion_gsm8k", benchmark="gsm8k")]),
        "together": write("together", made(4, batch_size=4), system="Batch"),
        "fused": write("fused", made(5, settings={"fuse": True, "completion": "verifier"})),
        "cacheless": write("cacheless", made(4), **AR | {"system": "Mine"}, arguments={"backend": "transformers"}),
        "thoughts": write("thoughts", thoughts, system="Thinker"),
        "protocols": write("protocols", [*made(3, protocol="a@111111111111"), *others], "0"),
        "real": write("real", real(5), system="ReFusion", backbone="Qwen/Qwen3-8B"),
        "rival": write("rival", real(4), "02", **LLADA, expected={"refusion_gsm8k": 6}),
    }
    judged = {
        "unjudged": (made(3), "error", "", {}),
        "unisolated": (made(3, task="mini_mbpp"), "passed", NO_ISOLATION, {}),
        "filters": (made(4, task="mini_math"), "correct", "", {STATED: 1.0, f"{BY_FILTER}last": 1.0}),
        "unscored": (made(4), "correct", "", {}),
    }
    for name, (samples, verdict, tier, filters) in judged.items():
        of_all = [] if name != "unscored" else samples[:2]
        found[name] = write(name, samples, scored=of_all, system=name.capitalize())
        with RunStore.open(found[name]) as store:
            for number, one in enumerate(samples if name != "unscored" else ()):
                row = {"key": one.key, "item_id": one.item_id, "scorer": "test"}
                value = float(verdict != "error" and number < 2)
                scores = [ScoreRow(**row, value=value, verdict=verdict, tier=tier, extracted="x")]
                scores += [ScoreRow(**row, metric=metric, value=float(number)) for metric in filters]
                store.append_scores(scores)
    return found


# Name of a group -> its runs, which some views show together.
GROUPS = {
    **{name: (name,) for name in ("complete", "errors", "several", "unjudged", "unisolated", "filters", "unscored")},
    **{name: (name,) for name in ("prompts", "together", "thoughts", "protocols", "cacheless", "long")},
    "speedups": ("complete", "baseline", "stock"),
    "extents": ("complete", "limited", "cut", "early"),
    "served": ("served", "baseline"),
    "seeds": ("seed1", "seed2"),
    "machines": ("seed1", "elsewhere"),
    "fused": ("baseline", "fused"),
    "real": ("real", "rival"),
}
_VOLATILE = (
    (re.compile(r"\b20\d\d-\d\d-\d\d[T_]\d\d[-:]\d\d[-:]\d\d(\.\d+)?([+-]\d\d:?\d\d|Z)?"), "TIME"),
    (re.compile(r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"), "UUID"),
    (re.compile(r"(?<=[-@])[0-9a-f]{12}\b"), "HASH"),  # of protocols, which hold versions
    (re.compile(r"(?<![\w.])[0-9a-f]{16}([0-9a-f]{48})?\b"), "HASH"),  # of records, which hold times
)


def plain(text, folder):
    """A text without the places and times of this run of the test."""
    text = re.sub(r"/[^ '\"]*/runs\d+\b", "RUNS", text.replace(str(folder), "FOLDER").replace(sys.executable, "python"))
    for pattern, word in _VOLATILE:
        text = pattern.sub(word, text)
    return text


def lines_of(folder, *words):
    """What a command prints, its notes and its error, without the progress that depends on how logging is set up."""
    done = CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": "240"})
    said = done.exception if done.exception is not None and not isinstance(done.exception, SystemExit) else ""
    notes = [line for line in done.stderr.splitlines() if line.startswith(("note:", "error:", "+ "))]
    text = "\n".join([done.stdout.rstrip("\n"), *notes, *([f"error: {said}"] if said else [])])
    return [line.rstrip() for line in plain(text, folder).splitlines()]


def json_of(folder, *words):
    done = CliRunner().invoke(app, [*map(str, words), "--json"])
    return json.loads(plain(done.stdout, folder)) if done.exit_code == 0 else lines_of(folder, *words)


def files_of(folder, out):
    """Path -> lines of the texts that were written, of JSON its value; equal paths are numbered."""
    paths = [path for path in out.rglob("*") if path.is_file() and path.suffix not in (".pdf", ".png")]
    texts = sorted((plain(path.relative_to(out).as_posix(), folder), plain(path.read_text(), folder)) for path in paths)
    found = {}
    for name, text in texts:
        number = sum(other.startswith(name) for other in found)
        found[f"{name} {number}" if number else name] = (
            json.loads(text) if name.endswith(".json") else text.splitlines()
        )
    return found


@pytest.mark.parametrize("view", ["table", "speed"])
def test_tables(view, runs, tmp_path):
    endings = {"table": ("markdown", "latex"), "speed": ("markdown",)}
    found = {}
    for group, names in GROUPS.items():
        words = (view, *(runs[name] for name in names))
        out = tmp_path / "out" / group
        options = [word for ending in endings[view] for word in (f"--{ending}", out / f"{view}.{ending}")]
        found[group] = lines_of(tmp_path, *words, *options)
        found[f"{group} as files"] = files_of(tmp_path, out) if out.exists() else {}
        found[f"{group} as JSON"] = json_of(tmp_path, *words)
    check(f"view_{view}", found)


def test_comparisons(runs, tmp_path):
    pairs = (("complete", "baseline"), ("limited", "cut"), ("seed1", "elsewhere"), ("errors", "long"))
    pairs += (("served", "baseline"), ("prompts", "prompts"), ("complete", "unscored"), ("several", "seed1"))
    found = {}
    for first, second in pairs:
        for options in ((), ("--common-items",)):
            words = ("compare", runs[first], runs[second], *options)
            name = " ".join((first, second, *options))
            found[name] = lines_of(tmp_path, *words)
            found[f"{name} as JSON"] = json_of(tmp_path, *words)
    check("view_compare", found)


def test_pages(runs, tmp_path):
    found = {}
    for group, names in GROUPS.items():
        paths = [runs[name] for name in names]
        content = collect(paths, LetterSources())
        board = leaderboard(read_placed(paths))
        for part in ("published", "differing"):
            board.pop(part)
        values = {"page": content.index, "notes": list(content.notes), "leaderboard": board}
        found |= {f"{group} {name}": json.loads(plain(json.dumps(value), tmp_path)) for name, value in values.items()}
    check("view_pages", found)


@pytest.mark.parametrize("form", ["csv", "jsonl", "every-eval-ever", "lm-eval", "hf"])
def test_exports(form, runs, tmp_path):
    found = {}
    for group in ("extents", "errors", "served", "several", "prompts", "protocols", "unisolated", "filters", "real"):
        out = tmp_path / "out" / group
        paths = [runs[name] for name in GROUPS[group]]
        said = lines_of(
            tmp_path, "export", *paths, "--format", form, "--out", out / ("samples.jsonl" if form == "jsonl" else ".")
        )
        found[group] = sorted(said)
        found[f"{group} as files"] = files_of(tmp_path, out) if out.exists() else {}
    check(f"view_export_{form}", found)


def test_tables_figures_and_claims_of_the_paper(runs, tmp_path):
    found = {}
    for group in ("speedups", "extents", "served", "seeds", "fused", "errors", "real"):
        paths = [runs[name] for name in GROUPS[group]]
        out = tmp_path / "out" / group
        for name, words in {
            **{f"table {number}": ("paper-table", number) for number in ("1", "2", "3", "4")},
            "figure 1": ("plot", "figure1", "--task", "gsm8k"),
            "claims": ("claims", "--only-measured"),
        }.items():
            folder = out / name.replace(" ", "")
            found[f"{group} {name}"] = lines_of(tmp_path, *words, *paths, "--out", folder)
            found[f"{group} {name} as files"] = files_of(tmp_path, folder) if folder.exists() else {}
    check("view_paper", found)


PLANS = (
    "suite",
    "suite --limit 2 --samples 2",
    "suite --suite 2026 --limit 1",
    "suite --artefacts --fused --verifier",
    "suite --system all --tasks gsm8k --sandbox none",
    "suite --system qwen3 --no-baseline",
    "suite --system server --base-url http://127.0.0.1:9 --limit 1",
    "suite --model some/model --set tau_slot=0.5",
    "suite --model some/model --artefacts --set tau_slot=0.5",
    "suite --model some/model --tasks math --samples 4 --prompts release",
    "protocol run table1 --tasks gsm8k --limit 10",
    "protocol run eval --limit 2",
    "sweep mini_figure4",
    "sweep mini_figure6 --limit 2 --rounds 2",
    "sweep mini_figure8 --samples 2",
)


def test_plans(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = {}
    for words in PLANS:
        command = (*words.split(), "--dry-run")
        found[words] = lines_of(tmp_path, *command)
        found[f"{words} as JSON"] = json_of(tmp_path, *command)
    check("view_plans", found)


def test_no_record_is_left_of_a_view_that_is_gone():
    names = {path.stem for path in (Path(__file__).parent / "records").glob("view_*.json")}
    exports = {f"view_export_{form}" for form in ("csv", "jsonl", "every-eval-ever", "lm-eval", "hf")}
    assert names == {"view_table", "view_speed", "view_compare", "view_pages", "view_paper", "view_plans", *exports}
