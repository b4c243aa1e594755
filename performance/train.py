"""Training steps of ReFusion against a plain loop, in tokens/s and peak memory: `python performance/train.py`.

Both train the same random Qwen3 on the same synthetic samples in the same batches with the same random draws. Each runs
in its own process, so that its peak memory can be measured, and the two alternate at every step, so that other load on
the machine slows both.
"""

import multiprocessing
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Annotated, Any

import numpy as np
import torch
import typer
from command import Device, Out, prepare, run_script, show_progress, write_json
from train_contestant import (
    CONTESTANTS,
    OURS,
    PLAIN,
    TRAIN_SHAPES,
    TrainBenchSettings,
    batches_of,
    packed_batch,
    serve,
)

from refusion_eval.cli.parameters import numbers_of
from refusion_eval.errors import ConfigError
from refusion_eval.training.objectives.example import TrainingSample


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """Speed and memory of one implementation of training.

    Attributes:
        tokens_per_second: speed of each round; prompt and answer tokens count, padding does not.
        peak_bytes: peak memory of the process (on CUDA: of its tensors).
        idle_bytes: memory with the model loaded, before the first step.
        first_loss: loss of the first step with the initial weights; equal for both implementations up to rounding.
    """

    tokens_per_second: tuple[float, ...]
    peak_bytes: int
    idle_bytes: int
    first_loss: float

    @property
    def median(self) -> float:
        """Median of the tokens per second over rounds."""
        return statistics.median(self.tokens_per_second)

    @property
    def step_bytes(self) -> int:
        """Memory that training needs in addition to the model."""
        return self.peak_bytes - self.idle_bytes


@dataclass(frozen=True, kw_only=True)
class TrainReport:
    """Result of a measurement.

    Attributes:
        conditions: settings, shapes and versions.
        rows: rows per useful token: "padded" for the plain loop, "packed" and "projected" for our implementation.
        contestants: speed and memory by name of the implementation.
    """

    conditions: Mapping[str, Any]
    rows: Mapping[str, float]
    contestants: Mapping[str, Contestant]

    @property
    def ratios(self) -> dict[str, float]:
        """Ratios of the medians, and of the lowest and highest round; these are comparable between machines."""
        ours, plain = self.contestants[OURS], self.contestants[PLAIN]
        by_round = [a / b for a, b in zip(ours.tokens_per_second, plain.tokens_per_second, strict=True)]
        return {
            "tokens/s: ours / plain loop": ours.median / plain.median,
            "tokens/s: ours / plain loop, lowest round": min(by_round),
            "tokens/s: ours / plain loop, highest round": max(by_round),
            "peak memory: ours / plain loop": ours.peak_bytes / plain.peak_bytes,
            "peak memory beyond the model: ours / plain loop": ours.step_bytes / plain.step_bytes,
        }

    def to_json(self) -> dict[str, Any]:
        """The ratios, then all fields, as plain JSON types."""
        return {"ratios": self.ratios, **asdict(self)}


def measure_training(settings: TrainBenchSettings, progress: Callable[[str], None] = lambda text: None) -> TrainReport:
    """Lets both implementations train in turns and compares them.

    Args:
        settings: model, samples and rounds.
        progress: called with a line of text before each warm-up and round.

    Raises:
        ConfigError: a process of an implementation ended, for example because memory ran out.
    """
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    processes, first_losses = [], {}
    for name in CONTESTANTS:
        progress(f"warm-up: {name}")
        pipes[name], child_end = context.Pipe()
        process = context.Process(target=serve, args=(child_end, name, settings), daemon=True)
        process.start()
        child_end.close()  # otherwise `recv` would wait forever for a process that died
        processes.append(process)
        first_losses[name] = _answer(name, pipes[name])
    seconds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    batches = batches_of(settings)
    for number in range(settings.num_rounds):
        progress(f"round {number + 1} of {settings.num_rounds}")
        spent = dict.fromkeys(CONTESTANTS, 0.0)
        for step in range(len(batches)):
            for name, pipe in pipes.items():
                pipe.send(step)
                spent[name] += _answer(name, pipe)
        for name in CONTESTANTS:
            seconds[name].append(spent[name])
    num_tokens = sum(sample.length for samples in batches for sample in samples)
    contestants = {}
    for name, pipe in pipes.items():
        pipe.send(None)
        peak_bytes, idle_bytes = _answer(name, pipe)
        contestants[name] = Contestant(
            tokens_per_second=tuple(num_tokens / round_seconds for round_seconds in seconds[name]),
            peak_bytes=peak_bytes,
            idle_bytes=idle_bytes,
            first_loss=first_losses[name],
        )
    for process in processes:
        process.join()
    return TrainReport(conditions=_conditions(settings), rows=_rows(settings, batches), contestants=contestants)


def _answer(name: str, pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError as error:
        raise ConfigError(
            f"the process of {name!r} ended; its message stands above; without a message, memory ran out: choose a "
            "smaller shape, batch_size or max_length"
        ) from error


def _conditions(settings: TrainBenchSettings) -> dict[str, Any]:
    device = settings.torch_device
    return {
        **asdict(settings),
        "device": str(device),
        "dtype": str(settings.torch_dtype).removeprefix("torch."),
        "shapes": asdict(TRAIN_SHAPES[settings.shape]),
        "hardware": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{os.cpu_count()} CPU cores ({platform.machine()})",
        "threads": settings.threads or torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _rows(settings: TrainBenchSettings, batches: list[list[TrainingSample]]) -> dict[str, float]:
    shape, rng = TRAIN_SHAPES[settings.shape], np.random.default_rng(settings.seed)
    ours = [packed_batch(shape, samples, rng) for samples in batches]
    num_tokens = sum(sample.length for samples in batches for sample in samples)
    return {
        "padded": sum(len(samples) * max(sample.length for sample in samples) for samples in batches) / num_tokens,
        "packed": sum(len(batch.tokens_T) for batch in ours) / num_tokens,
        "projected": sum(len(batch.ar.rows_R) + len(batch.mdm.rows_R) for batch in ours) / num_tokens,
    }


def summary(reports: Sequence[TrainReport]) -> str:
    """The ratios of several reports, one line for each batch size."""
    lines = [
        "Ours / plain loop",
        f"{'samples a step':>14} {'tokens/s':>9} {'rounds':>14} {'peak memory':>12} {'padded rows a token':>20}",
    ]
    for report in reports:
        speed, lowest, highest, memory, *_ = report.ratios.values()
        rounds = f"{lowest:.2f} to {highest:.2f}"
        size, padded = report.conditions["batch_size"], report.rows["padded"]
        lines.append(f"{size:>14} {speed:>8.2f}x {rounds:>14} {memory:>12.2f} {padded:>20.2f}")
    return "\n".join(lines)


def table(report: TrainReport) -> str:
    """The report as text, ratios first."""
    lines = [f"{report.conditions['batch_size']} samples a step: ratios (medians of one run)"]
    lines += [f"  {name:<50} {ratio:6.2f}" for name, ratio in report.ratios.items()]
    lines += ["", "Rows per useful token"]
    lines += [f"  {name:<50} {share:6.2f}" for name, share in report.rows.items()]
    lines += [
        "",
        f"{'Training':<14} {'tokens/s':>9} {'lowest':>9} {'highest':>9} {'peak MB':>9} {'of steps':>9}  first loss",
    ]
    for name, contestant in report.contestants.items():
        speeds = contestant.tokens_per_second
        figures = f"{contestant.median:9.0f} {min(speeds):9.0f} {max(speeds):9.0f}"
        memory = f"{contestant.peak_bytes / 1e6:9.0f} {contestant.step_bytes / 1e6:9.0f}"
        lines.append(f"  {name:<12} {figures} {memory}  {contestant.first_loss:.4f}")
    conditions = report.conditions
    return "\n".join(
        [
            *lines,
            "",
            f"{conditions['shape']}, random weights; {conditions['num_samples']} synthetic samples a round, "
            f"{conditions['batch_size']} a step, {conditions['num_rounds']} rounds; {conditions['hardware']}, "
            f"{conditions['dtype']}, {conditions['threads']} threads, torch {conditions['torch']}",
        ]
    )


def main(
    shape: Annotated[str, typer.Option(help="small, 0.6B or 8B: random weights of this shape.")] = "small",
    samples: Annotated[int, typer.Option(min=1, help="Synthetic samples of a round.")] = 32,
    batch_sizes: Annotated[
        str,
        typer.Option("--batch-size", help="Samples of a step, one or several numbers with commas; the release has 4."),
    ] = "4,8,16",
    rounds: Annotated[int, typer.Option(min=1, help="Number of interleaved rounds.")] = 3,
    mean_length: Annotated[int, typer.Option(help="Mean number of tokens of a sample, lognormal.")] = 330,
    max_length: Annotated[int, typer.Option(help="Largest number of tokens of a sample.")] = 4096,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; by default torch's own choice.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    device: Device = "auto",
    seed: Annotated[int, typer.Option(help="Seed of lengths, tokens, weights and draws.")] = 0,
    out: Out = None,
) -> None:
    """Measure training steps against a plain loop with padding and all logits: tokens per second, peak memory."""
    settings = [
        TrainBenchSettings(
            shape=shape,
            num_samples=samples,
            batch_size=batch_size,
            num_rounds=rounds,
            mean_length=mean_length,
            max_length=max_length,
            device=device,
            dtype=dtype,
            threads=threads,
            seed=seed,
        )
        for batch_size in numbers_of(batch_sizes, "--batch-size", int)
    ]
    prepare(out)
    reports = [measure_training(each, show_progress) for each in settings]
    print("\n\n".join([summary(reports), *map(table, reports)]))
    write_json(out, [report.to_json() for report in reports])


if __name__ == "__main__":
    run_script(main)
