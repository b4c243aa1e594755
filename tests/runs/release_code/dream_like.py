"""A stand-in with the interface of Dream: a model that sees the whole text, and the method `diffusion_generate`."""

import os
import sys

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM


class DreamLikeConfig(Qwen2Config):
    model_type = "Dream"


class DreamLike(Qwen2ForCausalLM):
    config_class = DreamLikeConfig

    def forward(self, input_ids=None, attention_mask=None, **_):
        length = input_ids.shape[1]
        return super().forward(input_ids, attention_mask=torch.zeros(1, 1, length, length), use_cache=False)

    def diffusion_generate(self, inputs, generation_config=None, **given):
        print("this line is no answer", sys.stdin.readline())
        if keys := [name for name in os.environ if "SECRET" in name]:
            raise PermissionError(f"the environment has {keys}")
        mask, length, steps = given["mask_token_id"], given["max_new_tokens"], given["steps"]
        canvas = torch.cat([inputs, torch.full((1, length), mask)], 1)
        times = torch.linspace(1, given.get("eps", 1e-3), steps + 1)
        for step in range(steps):
            masked = canvas == mask
            logits = self(canvas).logits
            probs = torch.cat([logits[:, :1], logits[:, :-1]], 1).softmax(-1)
            probs[..., mask] = 0
            best, tokens = probs.max(-1)
            count = int(masked.sum())
            count = int(count * (1 - times[step + 1] / times[step])) if step < steps - 1 else count
            chosen = torch.where(masked, best, -1.0)[0].topk(count).indices
            canvas[0, chosen] = tokens[0, chosen]
        return canvas
