"""The log of a training run: a CSV file, optionally TensorBoard, and a status line on the terminal."""

import csv
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from refusion_eval.errors import ConfigError
from refusion_eval.store.atomic_write import write_atomically

LOG_FILE, TENSORBOARD_FOLDER = "log.csv", "tensorboard"
# Apart from step and epoch, each column covers the steps since the previous line: mean losses, last learning rate and
# gradient norm, number of tokens, and seconds without the time for checkpoints.
COLUMNS = ("step", "epoch", "ar", "mdm", "total", "lr", "grad_norm", "tokens", "seconds", "tokens_per_second", "mfu")


class RunLog(TrainerCallback):
    """Writes the values that the trainer logs, on rank 0 only.

    When a run continues from a checkpoint, the lines of later steps are removed first, because these steps run again.
    """

    def __init__(
        self, run_dir: Path, num_steps: int, *, tensorboard: bool = False, stream: TextIO | None = None
    ) -> None:
        self._path, self._num_steps = run_dir / LOG_FILE, num_steps
        self._stream = stream or sys.stderr
        self._board_dir = run_dir / TENSORBOARD_FOLDER if tensorboard else None
        self._board: Any = None
        self._started, self._first_step = 0.0, 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Opens the log at the first step of this process."""
        self._started, self._first_step = time.perf_counter(), state.global_step
        if not state.is_world_process_zero:
            return
        rows = read_log(self._path) if self._path.exists() else []
        kept = [row.values() for row in rows if int(row["step"]) <= state.global_step]
        write_atomically(self._path, "".join(",".join(values) + "\n" for values in (COLUMNS, *kept)))
        if self._board_dir is not None:
            self._board = summary_writer()(str(self._board_dir), purge_step=state.global_step + 1)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Appends a line."""
        if not state.is_world_process_zero or logs is None or "ar" not in logs:
            return
        line = {name: logs.get(name) for name in COLUMNS} | {"step": state.global_step}
        with self._path.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow(line)
        if self._board is not None:
            for name, value in line.items():
                if name != "step" and value is not None:
                    self._board.add_scalar(name, value, state.global_step)
        self._show(line)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Closes TensorBoard and ends the status line."""
        if self._board is not None:
            self._board.close()
        if state.is_world_process_zero and self._stream.isatty():
            print(file=self._stream)

    def _show(self, line: dict[str, Any]) -> None:
        step = line["step"]
        elapsed = time.perf_counter() - self._started
        remaining = elapsed / max(step - self._first_step, 1) * (self._num_steps - step)
        mfu = "" if line["mfu"] is None else f"  MFU {line['mfu']:.1%}"
        text = (
            f"step {step}/{self._num_steps}  epoch {line['epoch']:.2f}  ar {line['ar']:.4f}  mdm {line['mdm']:.4f}  "
            f"lr {line['lr']:.2e}  {line['tokens_per_second']:.0f} tokens/s{mfu}  {_clock(remaining)} left"
        )
        terminal = self._stream.isatty()
        print(f"\r\x1b[2K{text}" if terminal else text, end="" if terminal else "\n", file=self._stream, flush=True)


def read_log(path: Path) -> list[dict[str, str]]:
    """The lines of a `log.csv`, without a last line that a crash truncated."""
    with path.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if None not in row.values()]


def summary_writer() -> Any:
    """The writer class of TensorBoard.

    Raises:
        ConfigError: TensorBoard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as problem:
        raise ConfigError(
            "output.tensorboard=true needs the package tensorboard; install it, or leave the setting out: log.csv has "
            "the same values"
        ) from problem
    return SummaryWriter


def _clock(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"
