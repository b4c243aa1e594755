"""The log of a training run: a CSV file, and a line on stderr."""

import csv
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from refusion_eval.store.atomic_write import write_atomically

LOG_FILE = "log.csv"
# Apart from step and epoch, each column covers the steps since the previous line: mean losses, last learning rate and
# gradient norm, number of tokens, and seconds without the time for checkpoints.
COLUMNS = ("step", "epoch", "ar", "mdm", "total", "lr", "grad_norm", "tokens", "seconds", "tokens_per_second", "mfu")


class RunLog(TrainerCallback):
    """Writes the values that the trainer logs, on rank 0 only."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / LOG_FILE
        self._started, self._first_step = 0.0, 0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._started, self._first_step = time.perf_counter(), state.global_step
        if state.is_world_process_zero:
            # Steps after the checkpoint that a run continues from run again, and write their lines again.
            rows = read_log(self._path) if self._path.exists() else []
            kept = [row.values() for row in rows if int(row["step"]) <= state.global_step]
            write_atomically(self._path, "".join(",".join(values) + "\n" for values in (COLUMNS, *kept)))

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **_: Any
    ) -> None:
        if not state.is_world_process_zero or "ar" not in logs:
            return
        step = state.global_step
        with self._path.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow({"step": step, **logs})
        seconds_per_step = (time.perf_counter() - self._started) / max(step - self._first_step, 1)
        left = timedelta(seconds=round(seconds_per_step * (state.max_steps - step)))
        mfu = f"  MFU {logs['mfu']:.1%}" if "mfu" in logs else ""
        print(
            f"step {step}/{state.max_steps}  epoch {logs['epoch']:.2f}  ar {logs['ar']:.4f}  mdm {logs['mdm']:.4f}  "
            f"lr {logs['lr']:.2e}  {logs['tokens_per_second']:.0f} tokens/s{mfu}  {left} left",
            file=sys.stderr,
            flush=True,
        )


def read_log(path: Path) -> list[dict[str, str]]:
    """The lines of a `log.csv`, without a last line that a crash truncated."""
    with path.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if None not in row.values()]
