"""Model FLOPs utilisation (MFU): FLOPs that a training step needs, relative to the peak of the devices.

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

from refusion_eval.training.data.batches import ForwardInputs

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
