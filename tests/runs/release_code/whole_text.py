"""A stand-in for a model that sees the whole text, without a loop of its own."""

import torch
from transformers import Qwen3ForCausalLM


class WholeText(Qwen3ForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, **_):
        length = input_ids.shape[1]
        return super().forward(input_ids, attention_mask=torch.zeros(1, 1, length, length), use_cache=False)
