"""`python -m miniature.letters`: the letters of the choice tasks with reasoning before them, and without.

Without reasoning, the answer of the model is made to begin with its last sentence up to the letter. The difference says
how much of an accuracy comes from what the model wrote before the letter.
Items are held-out draws, which are no test items, and all decoders have their plain settings (`measure.PLAIN`).

    python -m miniature.letters --models W/out/ --out results/embedded/letters.csv
"""

import argparse
from itertools import takewhile
from pathlib import Path

import numpy as np
import pandas

from miniature.family import EMBEDDED, Family
from miniature.item import Item
from miniature.measure import PLAIN, draws, measure
from refusion_eval import api
from refusion_eval.benchmarks import BENCHMARKS, Benchmark
from refusion_eval.metrics import Share

COLUMNS = ("system", "task", "n", "reasoning", "accuracy", "low", "high")
LAST_SENTENCES = ("The answer is (A).", "The answer is (B).")


def num_right_at_once(model: api.LoadedModel, decoder: str, benchmark: Benchmark, chosen: list[Item]) -> int:
    """Number of items whose letter is right without reasoning."""
    tokenizer, prompts, begun = model.tokenizer, [], []
    for item in chosen:
        asked = tokenizer.render_chat([{"role": "user", "content": benchmark.prompts.user(item.prompt_row)}])
        endings = [tokenizer.encode(asked + sentence) for sentence in LAST_SENTENCES]
        same = takewhile(lambda pair: pair[0] == pair[1], zip(*endings, strict=False))
        prompts.append([token for token, _ in same])  # the tokens before the letter
        begun.append(prompts[-1][len(tokenizer.encode(asked)) :])
    decoded = api.generate_many(model, prompts, decoder, gen_length=8, **PLAIN[decoder])
    texts = [tokenizer.decode([*start, *one.tokens]) for start, one in zip(begun, decoded, strict=True)]
    return sum(
        benchmark.extract(text, item.prompt_row).answer == benchmark.gold(item.prompt_row)
        for text, item in zip(texts, chosen, strict=True)
    )


def measured(family: Family, models: str, num_items: int) -> pandas.DataFrame:
    """Two rows for each system with a plain decoder and each choice task."""
    rows = []
    for system in family.systems:
        if system.decoder not in PLAIN or system.variant:
            continue
        model = api.load_model(f"{models}{system.model}")
        for task in ("mmlu_pro", "arc_challenge", "gpqa"):
            benchmark, chosen = BENCHMARKS[task], draws(family, task, num_items)
            settings = {"gen_length": family.gen_length, **PLAIN[system.decoder]}
            after = measure(model, system.decoder, benchmark, chosen, **settings).accuracy
            at_once = num_right_at_once(model, system.decoder, benchmark, chosen)
            for reasoning, accuracy in (("yes", after), ("no", 100 * at_once / len(chosen))):
                share = Share(accuracy, np.empty(0), len(chosen), 100.0).interval()
                row = (system.name, task, len(chosen), reasoning, accuracy, share.low, share.high)
                rows.append(dict(zip(COLUMNS, row, strict=True)))
                print(f"{system.name} {task}, reasoning {reasoning}: {accuracy:.1f} %", flush=True)
    return pandas.DataFrame(rows, columns=COLUMNS)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m miniature.letters", description="Letters without reasoning.")
    parser.add_argument("--models", required=True, help="prefix of the checkpoints, such as embedded: or W/out/")
    parser.add_argument("--out", type=Path, required=True, help="the CSV")
    parser.add_argument("--items", type=int, default=200, help="held-out draws of each task: %(default)s")
    given = parser.parse_args()
    measured(EMBEDDED, given.models, given.items).to_csv(given.out, index=False, float_format="%.4g")


if __name__ == "__main__":
    main()
