"""`python -m miniature.digits`: how often the next-token head errs at the digits of results.

The response of each held-out draw is given to the model as it is, token by token in reading order, and the likeliest
next token is compared with the true one. Results are what stands behind "=" and in the last sentence. This moves long
before the accuracy of whole responses does. Models with a next-token head only: the backbone, AR-SFT and ReFusion.

    python -m miniature.digits --models embedded:refusion,embedded:autoregressive_sft --out digits.csv
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

import pandas
import torch
from transformers import AutoModelForCausalLM

from miniature.family import EMBEDDED, Family
from miniature.item import Item
from miniature.measure import draws
from refusion_eval import api
from refusion_eval.benchmarks import BENCHMARKS

TASKS = ("gsm8k", "math")
COLUMNS = ("checkpoint", "task", "n", "digits", "wrong", "percent")
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


def errors(family: Family, name: str, folder: str, num_items: int) -> list[dict[str, object]]:
    """A row for each task: the digits of results, and the share of wrong ones in percent."""
    model, rows = api.load_model(folder), []
    for task in TASKS:
        chosen = draws(family, task, num_items)
        wrong, total = wrong_digits(model, task, chosen)
        rows.append(dict(zip(COLUMNS, (name, task, len(chosen), total, wrong, 100 * wrong / total), strict=True)))
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m miniature.digits", description="Errors at digits of results.")
    parser.add_argument("--models", required=True, help="checkpoints, separated by commas, each perhaps as NAME=FOLDER")
    parser.add_argument("--items", type=int, default=100, help="held-out draws of each task: %(default)s")
    parser.add_argument("--out", type=Path, help="CSV")
    given = parser.parse_args()
    rows = []
    for model in given.models.split(","):
        name, _, folder = model.rpartition("=")
        rows += errors(EMBEDDED, name or folder, folder, given.items)
        print(pandas.DataFrame(rows).tail(len(TASKS)).to_string(index=False, header=False), flush=True)
    if given.out:
        pandas.DataFrame(rows).to_csv(given.out, index=False, float_format="%.4g")


if __name__ == "__main__":
    main()
