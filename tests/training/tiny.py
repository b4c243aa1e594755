"""A tiny random Qwen3 of transformers, and what the training loss says of each labelled row."""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from refusion_eval.training.data.collate import PackedBatch
from refusion_eval.training.data.packed import hidden_states
from refusion_eval.training.objectives.loss import weighted_cross_entropy

VOCAB_SIZE, EOS, PAD, MASK = 24, 21, 22, 23


def random_model(seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=24,
        max_position_embeddings=128,
        initializer_range=0.3,  # so that it matters what a row sees
        eos_token_id=EOS,
        pad_token_id=PAD,
        mask_token_id=MASK,
    )
    return Qwen3ForCausalLM(config).eval()


@torch.no_grad()
def cross_entropies(model: Qwen3ForCausalLM, batch: PackedBatch) -> dict[int, float]:
    """Masked row of the batch -> cross-entropy there."""
    mdm = batch.mdm
    hidden_RD = hidden_states(model, batch)[mdm.rows_R]
    losses = weighted_cross_entropy(model.lm_head, hidden_RD, mdm.labels_R, mdm.weights_R)
    return dict(zip(mdm.rows_R.tolist(), losses.row_losses_R.tolist(), strict=True))
