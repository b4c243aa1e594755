"""The two implementations of training that `train.py` compares, and the process that runs one of them."""

import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

import numpy as np
import torch
from plain_train import plain_loss
from transformers import Qwen3Config, Qwen3ForCausalLM

from refusion_eval.bench.checkpoints import SHAPES, Shape
from refusion_eval.errors import ConfigError
from refusion_eval.models.device import process_memory, synchronize
from refusion_eval.training.config import ObjectiveConfig
from refusion_eval.training.data.collate import PackedBatch, collate
from refusion_eval.training.objectives.example import TrainingSample
from refusion_eval.training.objectives.loss import hybrid_loss
from refusion_eval.training.objectives.table import OBJECTIVES, SpecialIds

# In "small" the output head has a quarter of the parameters, as in 0.6B.
TRAIN_SHAPES: Mapping[str, Shape] = {
    "small": Shape(
        hidden_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=768,
        vocab_size=10240,
    ),
    **SHAPES,
}
OURS, PLAIN = "ours", "plain loop"
SPREAD = 0.9  # standard deviation of the logarithm of a length
PROMPT_SHARE = 0.3  # fraction of a sample's tokens that belongs to the prompt
MIN_LENGTH = 8
TRAINING = ObjectiveConfig(objective="refusion")


@dataclass(frozen=True, kw_only=True)
class TrainBenchSettings:
    """Model, samples and rounds of a measurement.

    Attributes:
        shape: key of `TRAIN_SHAPES`.
        num_samples: samples of a round.
        batch_size: samples of a step; 4 on each device in the release. Padding grows with it.
        num_rounds: passes over the samples; the implementations take turns at every step.
        mean_length, max_length: tokens of a sample; lengths are lognormal and cut at the maximum.
        device: torch device; "auto" is CUDA where available.
        dtype: dtype of the weights, "float32" or "bfloat16"; "auto" is bfloat16 on CUDA, float32 elsewhere.
        threads: CPU threads of each process; None keeps torch's own choice.
        seed: seed of lengths, tokens, weights and draws.
    """

    shape: str = "small"
    num_samples: int = 32
    batch_size: int = 4
    num_rounds: int = 3
    mean_length: int = 330
    max_length: int = 4096
    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.shape not in TRAIN_SHAPES:
            raise ConfigError(f"shape={self.shape!r} is unknown; known: {', '.join(TRAIN_SHAPES)}")
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ConfigError(f"dtype={self.dtype!r} cannot be trained in; use float32 or bfloat16")
        try:
            kind = self.torch_device.type
        except RuntimeError as error:
            raise ConfigError(f"device={self.device!r} is unknown; use cpu or cuda") from error
        if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
            raise ConfigError(f"device={self.device!r} is not available here; use cpu or cuda")
        if min(self.num_samples, self.batch_size, self.num_rounds) < 1:
            raise ConfigError(
                f"num_samples is {self.num_samples}, batch_size {self.batch_size} and num_rounds {self.num_rounds}; "
                "each must be at least 1"
            )
        if not MIN_LENGTH <= self.mean_length <= self.max_length:
            raise ConfigError(
                f"mean_length is {self.mean_length} and max_length {self.max_length}; "
                f"use {MIN_LENGTH} <= mean_length <= max_length"
            )

    @property
    def torch_device(self) -> torch.device:
        """The device, with "auto" resolved."""
        return (
            torch.device("cuda" if torch.cuda.is_available() else "cpu")
            if self.device == "auto"
            else torch.device(self.device)
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the weights, with "auto" resolved."""
        half = self.dtype == "bfloat16" or (self.dtype == "auto" and self.torch_device.type == "cuda")
        return torch.bfloat16 if half else torch.float32


def synthetic_samples(settings: TrainBenchSettings) -> list[TrainingSample]:
    """Samples of random tokens whose lengths resemble instruction data: many short samples and a long tail."""
    rng = np.random.default_rng(settings.seed)
    centre = np.log(settings.mean_length) - SPREAD**2 / 2  # gives the lognormal the requested mean
    drawn = rng.lognormal(centre, SPREAD, settings.num_samples)
    num_words = TRAIN_SHAPES[settings.shape].vocab_size - 3
    samples = []
    for length in np.clip(drawn, MIN_LENGTH, settings.max_length).astype(int).tolist():
        tokens = rng.integers(num_words, size=length).tolist()
        num_prompt = max(int(PROMPT_SHARE * length), 1)
        samples.append(TrainingSample(tuple(tokens[:num_prompt]), tuple(tokens[num_prompt:])))
    return samples


def special_ids(shape: Shape) -> dict[str, int]:
    """Token ids of EOS, padding and mask: the last three of the vocabulary."""
    return {"eos": shape.vocab_size - 3, "pad": shape.vocab_size - 2, "mask": shape.vocab_size - 1}


def random_model(settings: TrainBenchSettings) -> Qwen3ForCausalLM:
    """A Qwen3 with random weights of the requested shape, dtype and device."""
    torch.manual_seed(settings.seed)
    shape = TRAIN_SHAPES[settings.shape]
    ids = special_ids(shape)
    config = Qwen3Config(
        **asdict(shape),
        max_position_embeddings=settings.max_length,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
        eos_token_id=ids["eos"],
        pad_token_id=ids["pad"],
    )
    return Qwen3ForCausalLM(config).to(settings.torch_device, settings.torch_dtype).train()


def packed_batch(shape: Shape, samples: list[TrainingSample], rng: np.random.Generator) -> PackedBatch:
    """A packed batch of our implementation; a generator in the same state gives the plain loop the same draws."""
    ids = special_ids(shape)
    make, specials = OBJECTIVES["refusion"], SpecialIds(ids["eos"], ids["mask"])
    return collate([[make(sample, rng, TRAINING, specials) for sample in samples]])


def batches_of(settings: TrainBenchSettings) -> list[list[TrainingSample]]:
    """The samples of a round, one list for each step."""
    samples = synthetic_samples(settings)
    return [samples[start : start + settings.batch_size] for start in range(0, len(samples), settings.batch_size)]


def _our_loss(
    model: Qwen3ForCausalLM, shape: Shape, samples: list[TrainingSample], rng: np.random.Generator
) -> torch.Tensor:
    return hybrid_loss(model, packed_batch(shape, samples, rng).to(model.device)).total


def _plain_loss(
    model: Qwen3ForCausalLM, shape: Shape, samples: list[TrainingSample], rng: np.random.Generator
) -> torch.Tensor:
    ids = special_ids(shape)
    return plain_loss(model, samples, rng, mask=ids["mask"], pad=ids["pad"])


CONTESTANTS = {OURS: _our_loss, PLAIN: _plain_loss}


def serve(connection: Connection, name: str, settings: TrainBenchSettings) -> None:
    """Runs one implementation in this process.

    It sends the loss of its first step, which is also the warm-up. Then it trains each step whose number it receives
    and sends the seconds; when it receives None, it sends its peak and idle memory and ends.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    shape, batches, loss_of = TRAIN_SHAPES[settings.shape], batches_of(settings), CONTESTANTS[name]
    model = random_model(settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    rng = np.random.default_rng(settings.seed)

    def step(samples: list[TrainingSample]) -> torch.Tensor:
        loss = loss_of(model, shape, samples, rng)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    idle_bytes = _memory(model.device, peak=False)
    connection.send(step(batches[0]).item())
    while (number := connection.recv()) is not None:
        synchronize(model.device)
        started = time.perf_counter()
        step(batches[number])
        synchronize(model.device)
        connection.send(time.perf_counter() - started)
    connection.send((_memory(model.device, peak=True), idle_bytes))


def _memory(device: torch.device, *, peak: bool) -> int:
    """Memory of this process in bytes, on CUDA that of its tensors: the current value or the peak."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) if peak else torch.cuda.memory_allocated(device)
    # The peak of getrusage includes that of the parent process from before exec.
    if (own := process_memory(peak=peak)) is not None:
        return own
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
