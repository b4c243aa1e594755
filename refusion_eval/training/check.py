"""A quick measure of an AR model while it trains: would greedy decoding give the gold response?"""

from collections.abc import Sequence

import torch
from transformers import Qwen3ForCausalLM

from refusion_eval.training.data.collate import collate
from refusion_eval.training.data.packed import hidden_states
from refusion_eval.training.data.samples import Sample
from refusion_eval.training.objectives.corrupt import causal_example


@torch.no_grad()
def exact_share(model: Qwen3ForCausalLM, samples: Sequence[Sample], *, batch_size: int = 32) -> float:
    """Share of samples whose whole gold response, EOS included, is what greedy AR decoding would produce.

    One forward a sample: with the gold tokens as input, greedy decoding agrees exactly if the argmax does at every
    place. A lower bound of accuracy, since another response may end in the same answer.
    """
    num_exact = 0
    ordered = sorted(samples, key=lambda sample: sample.length)
    for start in range(0, len(ordered), batch_size):
        part = ordered[start : start + batch_size]
        examples = [causal_example(sample.prompt, sample.answer, learn_prompt=False) for sample in part]
        batch = collate(examples)
        predicted_R = model.lm_head(hidden_states(model, batch)[batch.ar.rows_R]).argmax(-1)
        sample_R = torch.arange(len(part)).repeat_interleave(torch.tensor(batch.lengths))[batch.ar.rows_R]
        wrong = set(sample_R[predicted_R != batch.ar.labels_R].tolist())
        num_exact += len(part) - len(wrong)
    return num_exact / len(samples)
