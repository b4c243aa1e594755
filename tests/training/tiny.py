"""A tiny random Qwen3 of transformers, and what the training loss says of each labelled row."""

from dataclasses import replace

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from refusion_eval.training.collate import Batch
from refusion_eval.training.loss import hybrid_loss

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


def cross_entropies(model: Qwen3ForCausalLM, batch: Batch) -> dict[int, float]:
    """Place in the flattened batch -> cross-entropy there: the derivative of the loss by the place's weight."""
    weights_R = batch.mdm.weights_R.clone().requires_grad_()
    loss = hybrid_loss(model, replace(batch, mdm=replace(batch.mdm, weights_R=weights_R))).mdm
    (derivatives_R,) = torch.autograd.grad(loss, weights_R)
    return dict(zip(batch.mdm.rows_R.tolist(), derivatives_R.tolist(), strict=True))
