"""The log of a training run: a CSV file, TensorBoard if it is wanted, and a live line on the screen."""

import csv
import io
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from refusion_eval.errors import ConfigError
from refusion_eval.store.atomic_write import write_atomically

LOG_FILE, TENSORBOARD_FOLDER = "log.csv", "tensorboard"
# All but step and epoch are of the steps since the line before: means of the losses, the last learning rate and
# gradient norm, sums of tokens and seconds, the latter without the writing of checkpoints.
COLUMNS = (
    "step",
    "epoch",
    "ar",
    "mdm",
    "total",
    "lr",
    "grad_norm",
    "tokens",
    "seconds",
    "tokens_per_second",
    "mfu",
)


class RunLog(TrainerCallback):
    """Writes what the trainer logs; on the first process only.

    Lines of steps behind the checkpoint that a run goes on from are removed first: they come again.

    Args:
        run_dir: gets `log.csv`, and `tensorboard/` if it is wanted.
        num_steps: of the run.
        tensorboard: whether it is.
        stream: of the live line; None is stderr.
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
        """Opens the log where the run begins or goes on."""
        self._started, self._first_step = time.perf_counter(), state.global_step
        if not state.is_world_process_zero:
            return
        rows = read_log(self._path) if self._path.exists() else []
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(row for row in rows if int(row["step"]) <= state.global_step)
        write_atomically(self._path, text.getvalue())
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
        """Adds a line."""
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
        """Closes what is open."""
        if self._board is not None:
            self._board.close()
        if state.is_world_process_zero and self._stream.isatty():
            print(file=self._stream)

    def _show(self, line: dict[str, Any]) -> None:
        step = line["step"]
        spent = time.perf_counter() - self._started
        left = spent / max(step - self._first_step, 1) * (self._num_steps - step)
        mfu = "" if line["mfu"] is None else f"  MFU {line['mfu']:.1%}"
        text = (
            f"step {step}/{self._num_steps}  epoch {line['epoch']:.2f}  ar {line['ar']:.4f}  mdm {line['mdm']:.4f}  "
            f"lr {line['lr']:.2e}  {line['tokens_per_second']:.0f} tokens/s{mfu}  {_clock(left)} left"
        )
        live = self._stream.isatty()
        print(f"\r\x1b[2K{text}" if live else text, end="" if live else "\n", file=self._stream, flush=True)


def read_log(path: Path) -> list[dict[str, str]]:
    """The lines of a `log.csv` as they are written; a last one that a crash cut is left out."""
    with path.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if None not in row.values()]


def summary_writer() -> Any:
    """TensorBoard's writer class.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as problem:
        raise ConfigError(
            "output.tensorboard=true needs the package tensorboard; install it, or leave it out: log.csv holds the same"
        ) from problem
    return SummaryWriter


def _clock(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"
