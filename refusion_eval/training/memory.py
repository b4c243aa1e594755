"""Memory that a training run needs on each device, from the shapes of its model, compared with what the device has.

Bytes for each weight, where n processes share the sharded parts:

| parallelism | weights | gradients | float32 copy and AdamW's two averages |
|---|---|---|---|
| ddp, weights in float32 | 4 | 4 | 8 |
| fsdp, weights in float32 | 4 / n | 4 / n | 8 / n |
| zero2, weights in bfloat16 | 2 | 4 / n | 12 / n, in the memory of the machine with `offload_optimizer` |

Frozen weights, of which adapters leave many, need no gradient and no averages. Activations come on top.
"""

import torch

from refusion_eval.engine.width import weight_bytes
from refusion_eval.errors import ConfigError
from refusion_eval.models.config import ModelConfig
from refusion_eval.training.config import LoraSettings, RunConfig

GB = 1e9
# What CUDA, its libraries and the fragmentation of the allocator take from every device.
OVERHEAD_BYTES = 3e9


def num_weights(model: ModelConfig) -> int:
    """Weights of a model, the embedding included."""
    embedding = 0 if model.tied_head else model.vocab_size * model.hidden_size
    return weight_bytes(model, torch.int8) + embedding


def num_adapter_weights(lora: LoraSettings, model: ModelConfig) -> int:
    """Trained weights of the adapters of all layers: rank x (inputs + outputs) of each adapted matrix."""
    hidden, inner = model.hidden_size, model.intermediate_size
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    outputs = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": queries}
    widths = [hidden + outputs.get(name, inner) for name in lora.target_modules]
    return lora.rank * model.num_layers * sum(widths)


def training_memory(config: RunConfig, model: ModelConfig, num_processes: int) -> float:
    """Bytes of weights, gradients and optimiser on each of `num_processes` devices, from the table above."""
    size = 2 if config.backbone.dtype == "bfloat16" else 4
    weights = trained = num_weights(model)
    trained_size = size
    if config.backbone.lora is not None:
        trained, trained_size = num_adapter_weights(config.backbone.lora, model), 4  # adapters are float32
    if config.parallelism == "zero2":
        on_device = 0 if config.optimisation.offload_optimizer else 12
        return size * weights + (4 + on_device) * trained / num_processes
    shared = num_processes if config.parallelism == "fsdp" else 1
    return (size * weights + (trained_size + 8) * trained) / shared


def check_memory(config: RunConfig, model: ModelConfig, num_processes: int, available: float | None) -> str:
    """Says what a run needs; refuses a run that cannot fit whatever the length of its samples.

    Args:
        available: bytes of a device; None on a CPU, where nothing is refused.

    Raises:
        ConfigError: weights, gradients and optimiser alone exceed the memory of a device.
    """
    needed = training_memory(config, model, num_processes)
    words = f"training needs {needed / GB:.1f} GB on each device for weights, gradients and optimiser"
    if available is not None and needed + OVERHEAD_BYTES > available:
        raise ConfigError(
            f"{words}; a device has {available / GB:.1f} GB. Ways out: more GPUs with parallelism=fsdp or zero2, "
            "optimisation.offload_optimizer=true with zero2, or adapters (backbone.lora)"
        )
    return f"{words}, and more for the tokens of a forward"
