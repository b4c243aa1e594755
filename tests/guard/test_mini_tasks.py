"""What runs of the mini tasks record and report, compared with stored records, verdicts, rows and tables."""

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from refusion_eval import cli
from refusion_eval.decoders import DECODERS
from refusion_eval.store.run_store import RunReader
from tests.guard.stored import check
from tests.models.tiny import save_word_tokenizer

CHECKPOINTS = Path(__file__).resolve().parents[1] / "data" / "parity" / "baselines" / "checkpoints"
# Fields of records and columns of tables that hold times, places, or the machine.
OF_A_SAMPLE = ("seconds", "prefill_seconds", "created", "process_id", "joules", "warm")
OF_A_ROW = ("seconds", "hardware", "card", "slowed_by", "note", "run_id")
TIMED = {
    "tps",
    "tps_mean",
    "decode_tps",
    "prefill_seconds",
    "latency_mean",
    "latency_p50",
    "latency_p95",
    "forwards_per_second",
    "mbu",
    "one_token_share",
}
TIMED_COLUMN = "TPS"
# Decoders that no checkpoint of the package fits, and random weights that they fit.
OTHERS = {
    "d2f_dream": "dream_3",
    "d2f_llada": "llada_2",
    "dream": "dream_3",
    "esolm": "qwen3_5",
    "fast_dllm_dream": "dream_3",
}


def run(run_dir: Path, model: str, decoder: str, tasks: str, **options: Any) -> Path:
    command = ["run", "--model", model, "--decoder", decoder, "--tasks", tasks, "--run-dir", str(run_dir)]
    command += ["--device", "cpu", "--dtype", "float32", "--attention", "sdpa", "--warmup", "0"]
    command += [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    cli.app(command, standalone_mode=False)
    return run_dir


def records(run_dir: Path) -> dict[str, Any]:
    """The samples and verdicts of a run by task and item, as they are stored, without times and places."""
    found: dict[str, Any] = {}
    with RunReader.open(run_dir) as reader:
        for sample in reader.samples():
            body = {name: value for name, value in json.loads(sample.body()).items() if name not in OF_A_SAMPLE}
            found[f"{sample.key.task} {sample.item_id}"] = {"sample": body, "trace": sample.trace, "scores": []}
        for score in reader.scores():
            body = {name: value for name, value in json.loads(score.body()).items() if name not in ("key", "tier")}
            # The last part of a scorer's name is the version of the package.
            body["scorer"] = body["scorer"].rpartition(" ")[0]
            found[f"{score.key.task} {score.item_id}"]["scores"].append(body)
    for entry in found.values():
        entry["scores"].sort(key=lambda body: (body["scorer"], body["metric"]))
    return found


def csv_rows(run_dir: Path) -> dict[str, Any]:
    with (run_dir / "results.csv").open(newline="") as file:
        return {
            f"{row['task']} {row['metric']}": {
                name: float(value) if name in ("value", "ci_low", "ci_high") and value else value
                for name, value in row.items()
                if name not in OF_A_ROW
            }
            for row in csv.DictReader(file)
            if row["metric"] not in TIMED
        }


def table_rows(run_dir: Path) -> dict[str, Any]:
    """The rows of table.md by task, without the column of a time and the mark of a limit, which is newer."""
    text = re.sub(r" \[limited[^\]]*\]", "", (run_dir / "table.md").read_text())
    lines = [line for line in text.splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    kept = [number for number, name in enumerate(head) if name != TIMED_COLUMN]
    return {row[0]: {head[number]: row[number] for number in kept} for row in rows}


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory, weights: str) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "refusion"
    return run(run_dir, "embedded", "refusion", "mini_suite", limit=2)


def test_the_records_of_every_mini_task_are_the_stored_ones(suite: Path) -> None:
    check("mini_records", records(suite))


def test_the_rows_of_the_csv_are_the_stored_ones(suite: Path) -> None:
    check("mini_csv", csv_rows(suite))


def test_the_rows_of_the_table_are_the_stored_ones(suite: Path) -> None:
    check("mini_table", table_rows(suite))


def test_a_batch_gives_the_same_records(suite: Path, tmp_path: Path) -> None:
    batched = records(run(tmp_path / "run", "embedded", "refusion", "mini_gsm8k,mini_parts", limit=2, batch_size=4))
    alone = {name: entry for name, entry in records(suite).items() if name in batched}
    for entry in (*batched.values(), *alone.values()):
        del entry["sample"]["batch_size"], entry["trace"]
    assert batched == alone
    assert len(batched) == 4


@pytest.mark.usefixtures("weights")
@pytest.mark.parametrize("decoder", ["autoregressive", "bd3lm", "fast_dllm_llada", "idlm", "llada", "wedlm"])
def test_the_records_of_the_other_embedded_decoders_are_the_stored_ones(decoder: str, tmp_path: Path) -> None:
    model = {"fast_dllm_llada": "embedded:llada"}.get(decoder, "embedded")
    run_dir = run(tmp_path / "run", model, decoder, "mini_gsm8k,mini_parts", limit=1)
    check(f"mini_{decoder}", {**records(run_dir), **csv_rows(run_dir)})


@pytest.mark.usefixtures("weights")
@pytest.mark.parametrize("decoder", sorted(OTHERS))
def test_the_records_of_decoders_with_random_weights_are_the_stored_ones(decoder: str, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(CHECKPOINTS / OTHERS[decoder], tmp_path / "checkpoint"))
    save_word_tokenizer(checkpoint, 180)
    options = {"limit": 1, "set": "eos_ids=190", "backbone": "random"}
    run_dir = run(tmp_path / "run", str(checkpoint), decoder, "mini_gsm8k", **options)
    check(f"mini_{decoder}", {**records(run_dir), **csv_rows(run_dir)})


def test_every_decoder_with_a_stored_run_is_still_there() -> None:
    assert {"refusion", "autoregressive", "bd3lm", "fast_dllm_llada", "llada", *OTHERS} <= set(DECODERS)
