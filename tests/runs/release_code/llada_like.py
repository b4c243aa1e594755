"""A stand-in with the interface of LLaDA's function `generate`, which stands in a file of its own."""

import torch


def generate(
    model,
    prompt,
    steps=8,
    gen_length=8,
    block_length=8,
    temperature=0.0,
    cfg_scale=0.0,
    remasking="low_confidence",
    mask_id=0,
):
    canvas = torch.cat([prompt, torch.full((1, gen_length), mask_id)], 1)
    for start in range(prompt.shape[1], canvas.shape[1], block_length):
        num_steps = steps // (gen_length // block_length)
        for step in range(num_steps):
            masked = canvas == mask_id
            masked[:, start + block_length :] = False
            probs = model(canvas).logits.softmax(-1)
            probs[..., mask_id] = 0
            best, tokens = probs.max(-1)
            count = block_length // num_steps + (step < block_length % num_steps)
            chosen = torch.where(masked, best, -1.0)[0].topk(count).indices
            canvas[0, chosen] = tokens[0, chosen]
    return canvas
