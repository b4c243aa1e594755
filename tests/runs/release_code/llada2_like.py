"""A stand-in with the interface of LLaDA2's method `generate`, which returns the answer without the prompt."""

import torch
from transformers import Qwen3ForCausalLM


class Llada2Like(Qwen3ForCausalLM):
    def generate(
        self, inputs, temperature=0.0, block_length=4, steps=4, gen_length=8, threshold=0.9, eos_id=1, mask_id=0
    ):
        cached = self(input_ids=inputs, use_cache=True)
        answer = []
        token = cached.logits[:, -1].argmax(-1)
        for _ in range(gen_length):
            answer.append(int(token))
            if answer[-1] == eos_id:
                break
            cached = self(input_ids=token[None], past_key_values=cached.past_key_values, use_cache=True)
            token = cached.logits[:, -1].argmax(-1)
        return torch.tensor([answer]), len(answer) + 1
