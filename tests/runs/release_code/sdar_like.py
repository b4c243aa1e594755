"""A stand-in with the interface of SDAR's function, which gets a mapping, and calls the model without its head."""

import torch


def block_diffusion_generate(
    model, prompt, mask_id, gen_length=8, block_length=4, denoising_steps=4, temperature=1.0, stopping_criteria_idx=None
):
    text = prompt["input_ids"]
    for _ in range(0, gen_length, block_length):
        canvas = torch.cat([text, torch.full((1, block_length), mask_id)], 1)
        for _ in range(denoising_steps):
            logits = model.lm_head(model.model(input_ids=canvas).last_hidden_state)[0, -block_length:]
            logits[:, mask_id] = -torch.inf
            canvas[0, -block_length:] = logits.argmax(-1)
        text = canvas
        if any(token in stopping_criteria_idx for token in text[0, prompt["input_ids"].shape[1] :].tolist()):
            break
    return text
