"""Memory that a training run needs on each device, from the shapes of its model, compared with what the device has.

Bytes for each weight, where n processes share the sharded parts:

| parallelism | weights | gradients | float32 copy and AdamW's two averages |
|---|---|---|---|
| ddp, weights in float32 | 4 | 4 | 8 |
| fsdp, weights in float32 | 4 / n | 4 / n | 8 / n |
| zero2, weights in bfloat16 | 2 | 4 / n | 12 / n, in the memory of the machine with `offload_optimizer` |

Frozen weights, of which adapters leave many, need no gradient and no averages. Activations come on top.

Model FLOPs utilisation (MFU): FLOPs that a training step needs, relative to the peak of the devices.

    MFU = FLOPs of the model / (seconds x peak FLOPs/s of all devices)

The FLOPs of the model are the sum of

- 2 per weight and row in the forward, 2 for the gradient of the input, and 2 for the gradient of a trained weight;
- the same for the output matrix and the MLP of the last layer, for labelled rows only, as no other row needs them;
- 4 (forward) and 8 (backward) per layer, per pair of rows that see each other, per unit of width of the query heads.

Recomputed activations (gradient checkpointing), embeddings, norms and the softmax do not count.
"""

from typing import NamedTuple, Self

import torch
from transformers import PreTrainedModel

from refusion_eval.errors import ConfigError
from refusion_eval.models.checkpoint import ModelConfig
from refusion_eval.models.weights import count_parameters, matrix_shapes
from refusion_eval.training.config import LoraSettings, RunConfig
from refusion_eval.training.data.batches import ForwardInputs

GB = 1e9
OVERHEAD_BYTES = 3e9  # taken from every device by CUDA, its libraries and the fragmentation of the allocator

# Dense bfloat16 FLOPs/s as the manufacturers state them, without sparsity; the first key that the device name contains.
PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "RTX 4090": 165e12,
    "MI300X": 1307e12,
}


def num_adapter_weights(lora: LoraSettings, model: ModelConfig) -> int:
    """Trained weights of the adapters of all layers: rank x (inputs + outputs) of each adapted matrix."""
    shapes = {module.rpartition(".")[2]: shape for module, shape in matrix_shapes(model).items()}
    return lora.rank * model.num_layers * sum(sum(shapes[name]) for name in lora.target_modules)


def training_memory(config: RunConfig, model: ModelConfig, num_processes: int) -> float:
    """Bytes of weights, gradients and optimiser on each of `num_processes` devices, from the table above."""
    weights, lora, size = count_parameters(model), config.backbone.lora, 2 if config.backbone.dtype == "bfloat16" else 4
    # Adapters are float32.
    trained, trained_size = (weights, size) if lora is None else (num_adapter_weights(lora, model), 4)
    if config.parallelism == "zero2":
        on_device = 0 if config.optimisation.offload_optimizer else 12
        return size * weights + (4 + on_device) * trained / num_processes
    shared = num_processes if config.parallelism == "fsdp" else 1
    return (size * weights + (trained_size + 8) * trained) / shared


def check_memory(config: RunConfig, model: ModelConfig, num_processes: int, available: float | None) -> str:
    """Says what a run needs; raises ConfigError if it cannot fit into the `available` bytes of a device at all."""
    needed = training_memory(config, model, num_processes)
    words = f"training needs {_size(needed)} on each device for weights, gradients and optimiser"
    if available is not None and needed + OVERHEAD_BYTES > available:
        raise ConfigError(
            f"{words}; a device has {_size(available)}. Ways out: more GPUs with parallelism=fsdp or zero2, "
            "optimisation.offload_optimizer=true with zero2, or adapters (backbone.lora)"
        )
    return f"{words}, and more for the tokens of a forward"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / GB:.1f} GB" if num_bytes >= GB else f"{num_bytes / 1e6:.1f} MB"


def peak_flops(device: torch.device) -> float | None:
    """Peak bfloat16 FLOPs/s of a device; None if `PEAK_FLOPS` does not contain it."""
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in device_name), None)


class TrainingCost(NamedTuple):
    per_row: int  # of all layers, without attention scores and the last MLP
    per_label: int  # of the last MLP and the output matrix, for each labelled row
    per_pair: int  # of attention, for each pair of rows that see each other

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """Cost of a model, whose `requires_grad` says which weights are trained."""
        embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
        # By module: adapters put tensors of their own beside these matrices.
        outside = {id(weight) for module in (embeddings, head) for weight in module.parameters()}
        inside = [weight for weight in model.parameters() if weight.ndim == 2 and id(weight) not in outside]
        last_mlp = sum(_weight_flops(weight) for weight in model.get_decoder().layers[-1].mlp.parameters())
        config = model.config
        head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            per_row=sum(_weight_flops(weight) for weight in inside) - last_mlp,
            per_label=last_mlp + _weight_flops(head.weight),
            per_pair=12 * config.num_hidden_layers * config.num_attention_heads * head_width,
        )

    def flops(self, inputs: ForwardInputs) -> int:
        batch = inputs["batch"]
        num_labels = len(batch.ar.rows_R) + len(batch.mdm.rows_R)
        return self.per_row * len(batch.tokens_T) + self.per_label * num_labels + self.per_pair * inputs["num_pairs"]


def _weight_flops(weight: torch.Tensor) -> int:
    return (6 if weight.requires_grad else 4) * weight.numel()
