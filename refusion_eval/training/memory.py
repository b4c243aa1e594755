"""Memory that a training run needs on each device, from the shapes of its model, compared with what the device has.

Bytes for each weight, where n processes share the sharded parts:

| parallelism | weights | gradients | float32 copy and AdamW's two averages |
|---|---|---|---|
| ddp, weights in float32 | 4 | 4 | 8 |
| fsdp, weights in float32 | 4 / n | 4 / n | 8 / n |
| zero2, weights in bfloat16 | 2 | 4 / n | 12 / n, in the memory of the machine with `offload_optimizer` |

Frozen weights, of which adapters leave many, need no gradient and no averages. Activations come on top.
"""

from dataclasses import dataclass

import torch

from refusion_eval.engine.width import weight_bytes
from refusion_eval.errors import ConfigError
from refusion_eval.models.config import ModelConfig
from refusion_eval.training.config import LoraSettings, RunConfig

GB = 1e9
# What CUDA, its libraries and the fragmentation of the allocator take from every device.
OVERHEAD_BYTES = 3e9


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """Bytes on each device.

    Attributes:
        weights, gradients, optimiser: exact, from the table above.
    """

    weights: float
    gradients: float
    optimiser: float
    per_row: float

    @property
    def fixed(self) -> float:
        """Everything that does not depend on the length of the samples."""
        return self.weights + self.gradients + self.optimiser

    def __str__(self) -> str:
        return (
            f"{self.fixed / GB:.1f} GB on each device (weights {self.weights / GB:.1f}, gradients "
            f"{self.gradients / GB:.1f}, optimiser {self.optimiser / GB:.1f}), and about "
            f"{1000 * self.per_row / GB:.1f} GB for every 1,000 tokens of a forward"
        )


def num_weights(model: ModelConfig) -> int:
    """Weights of a model, the embedding included."""
    embedding = 0 if model.tied_head else model.vocab_size * model.hidden_size
    return weight_bytes(model, torch.int8) + embedding


def num_adapter_weights(lora: LoraSettings, model: ModelConfig) -> int:
    """Trained weights of the adapters of all layers: rank x (inputs + outputs) of each adapted matrix."""
    hidden, inner = model.hidden_size, model.intermediate_size
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    sums = {
        "q_proj": hidden + queries,
        "k_proj": hidden + keys,
        "v_proj": hidden + keys,
        "o_proj": queries + hidden,
        "gate_proj": hidden + inner,
        "up_proj": hidden + inner,
        "down_proj": inner + hidden,
    }
    return lora.rank * model.num_layers * sum(sums[name] for name in lora.target_modules)


def training_memory(config: RunConfig, model: ModelConfig, num_processes: int) -> TrainingMemory:
    """Memory on each of `num_processes` devices.

    Args:
        model: shapes of the backbone.
    """
    size = 2 if config.backbone.dtype == "bfloat16" else 4
    weights = num_weights(model)
    trained, trained_size = weights, size
    if config.backbone.lora is not None:
        trained, trained_size = num_adapter_weights(config.backbone.lora, model), 4  # adapters are float32
    shared = num_processes if config.parallelism != "ddp" else 1
    per_row = _bytes_per_row(config, model)
    if config.parallelism == "zero2":
        on_device = 0 if config.optimisation.offload_optimizer else 12
        return TrainingMemory(size * weights, 4 * trained / shared, on_device * trained / shared, per_row)
    return TrainingMemory(size * weights / shared, trained_size * trained / shared, 8 * trained / shared, per_row)


def _bytes_per_row(config: RunConfig, model: ModelConfig) -> float:
    """Activations that the backward pass reads: those of all layers, or of one if they are computed again; logits."""
    size = 2 if config.optimisation.compute_dtype == "bfloat16" else 4
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    layer = size * (6 * model.hidden_size + 3 * heads + 4 * model.intermediate_size)
    layers = model.num_layers * layer
    if config.backbone.gradient_checkpointing:
        layers = model.num_layers * size * model.hidden_size + layer
    return layers + model.vocab_size * (size + 8)  # logits, their float32 copy, and its gradient


def check_memory(config: RunConfig, model: ModelConfig, num_processes: int, available: float | None) -> str:
    """Says what a run needs; refuses a run that cannot fit whatever the length of its samples.

    Args:
        model: shapes of the backbone.
        available: bytes of a device; None on a CPU, where nothing is refused.

    Raises:
        ConfigError: weights, gradients and optimiser alone exceed the memory of a device.
    """
    needed = training_memory(config, model, num_processes)
    if available is not None and needed.fixed + OVERHEAD_BYTES > available:
        ways = []
        if config.parallelism == "ddp" and config.backbone.lora is None:
            ways.append("parallelism=fsdp, which shares everything over the GPUs")
        if config.parallelism == "zero2" and not config.optimisation.offload_optimizer:
            ways.append("optimisation.offload_optimizer=true, which needs the machine's memory instead")
        if config.parallelism != "ddp" or config.backbone.lora is None:
            ways.append("more GPUs")
        if config.backbone.lora is None:
            ways.append("adapters (backbone.lora)")
        raise ConfigError(
            f"training needs {needed}; a device has {available / GB:.1f} GB for {num_processes} "
            f"process{'es' * (num_processes > 1)}. Ways out: {', or '.join(ways) or 'a smaller model'}"
        )
    return f"training needs {needed}"
