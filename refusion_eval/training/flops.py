"""What a training step computes at least, and what a device could: the two sides of model FLOPs utilisation (MFU).

    MFU = FLOPs of the model / (seconds x peak FLOPs/s of all devices)

with, for each row of a pack, 2 FLOPs a weight in the forward, 2 for the gradient of what the weight is multiplied with,
and 2 for its own gradient if it is trained; for each labelled row the same for the output matrix, as no other row is
projected; and in each layer, for each pair of rows of which one sees the other, 4 FLOPs for each unit of width of the
query heads in the forward and 8 in backward. Activations that are computed twice to save memory, embeddings, norms, and
the softmax do not count.
"""

from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from refusion_eval.training.objectives.example import Example

# Dense bfloat16 FLOPs/s as the manufacturers state them, without sparsity; the first name that the device's holds.
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
    """FLOPs/s of a device in bfloat16; None if the table does not know it."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAK_FLOPS.items() if known in name), None)


def visible_pairs(example: Example) -> int:
    """Pairs of an example's rows of which the one sees the other, itself included."""
    if example.visibility is None:
        return len(example.tokens) * (len(example.tokens) + 1) // 2
    blocks, noisy = example.visibility.blocks, example.visibility.noisy
    clean_B = np.bincount(blocks[~noisy], minlength=int(blocks.max()) + 1)
    noisy_B = np.bincount(blocks[noisy], minlength=len(clean_B))
    before_B = np.cumsum(clean_B) - clean_B
    return int((clean_B**2 + noisy_B**2 + (clean_B + noisy_B) * before_B).sum())


@dataclass(frozen=True, kw_only=True)
class TrainingCost:
    """FLOPs of forward and backward.

    Attributes:
        of_row: through all layers.
        of_label: of the output matrix.
        of_pair: of attention.
    """

    of_row: int
    of_label: int
    of_pair: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> "TrainingCost":
        """That of a model, whose weights say whether they are trained."""
        embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
        # By module: adapters put tensors of their own beside these matrices.
        outside = {id(weight) for module in (embeddings, head) for weight in module.parameters()}
        inside = [weight for weight in model.parameters() if weight.ndim == 2 and id(weight) not in outside]
        config = model.config
        head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            of_row=sum(_of_weights(weight) for weight in inside),
            of_label=_of_weights(head.weight),
            of_pair=12 * config.num_hidden_layers * config.num_attention_heads * head_width,
        )

    def flops(self, *, num_rows: int, num_labels: int, num_pairs: int) -> int:
        """FLOPs of a batch."""
        return self.of_row * num_rows + self.of_label * num_labels + self.of_pair * num_pairs


def _of_weights(weight: torch.Tensor) -> int:
    return (6 if weight.requires_grad else 4) * weight.numel()
