"""`python -m miniature.digits`: how often the next-token head errs at the digits of results.

The response of each held-out draw is given to the model as it is, token by token in reading order, and the likeliest
next token is compared with the true one. Results are what stands behind "=" and in the last sentence. This moves long
before the accuracy of whole responses does. Models with a next-token head only: the backbone, AR-SFT and ReFusion.

    python -m miniature.digits --models embedded:refusion,embedded:autoregressive_sft
"""

import argparse
import re
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM

from miniature.family import EMBEDDED, Family
from miniature.item import Item
from miniature.measure import draws
from refusion_eval import api
from refusion_eval.benchmarks import BENCHMARKS

TASKS = ("gsm8k", "math")
_RESULT = re.compile(r"(?<==)\d+|(?<=The answer is )\d+|(?<=boxed\{)\d+")


@torch.inference_mode()
def wrong_digits(model: api.LoadedModel, task: str, chosen: Sequence[Item]) -> tuple[int, int]:
    """Number of digits of results that the model predicts wrongly from all tokens before them, and of all digits."""
    tokenizer, network = model.tokenizer, AutoModelForCausalLM.from_pretrained(model.directory, dtype=torch.float32)
    wrong = total = 0
    for item in chosen:
        asked = tokenizer.render_chat([{"role": "user", "content": BENCHMARKS[task].prompts.user(item.prompt_row)}])
        tokens, num_asked = tokenizer.encode(asked + item.response), len(tokenizer.encode(asked))
        predicted = network(torch.tensor([tokens])).logits[0].argmax(-1).tolist()
        ends = [len(tokenizer.decode(tokens[num_asked : end + 1])) for end in range(num_asked, len(tokens))]
        of_results = {place for found in _RESULT.finditer(item.response) for place in range(*found.span())}
        rows = [num_asked + index for index, end in enumerate(ends) if end - 1 in of_results]
        wrong += sum(predicted[row - 1] != tokens[row] for row in rows)
        total += len(rows)
    return wrong, total


def errors(family: Family, name: str, num_items: int) -> dict[str, float]:
    """Share of wrong digits of results in percent, by task."""
    model = api.load_model(name)
    counts = {task: wrong_digits(model, task, draws(family, task, num_items)) for task in TASKS}
    return {task: 100 * wrong / total for task, (wrong, total) in counts.items()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m miniature.digits", description="Errors at digits of results.")
    parser.add_argument("--models", required=True, help="checkpoints, separated by commas")
    parser.add_argument("--items", type=int, default=100, help="held-out draws of each task: %(default)s")
    given = parser.parse_args()
    for name in given.models.split(","):
        found = errors(EMBEDDED, name, given.items)
        print(f"{name}: {', '.join(f'{task} {share:.2f} %' for task, share in found.items())}", flush=True)


if __name__ == "__main__":
    main()
