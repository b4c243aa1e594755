"""Opens runs as pandas data frames, prints sums by task, and draws tokens per forward of every sample.

python examples/evaluate.py runs/example
python examples/read_runs.py runs/example/refusion runs/example/autoregressive --out tpf.png
"""

import argparse
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from refusion_eval import results

parser = argparse.ArgumentParser(description="Draws tokens per forward of every sample.")
parser.add_argument("runs", nargs="+", type=Path, help="run directories")
parser.add_argument("--out", type=Path, default=Path("tpf.png"), help="picture (default: tpf.png)")
arguments = parser.parse_args()

samples = results.load(arguments.runs)
totals = samples.groupby(["system", "task"])[["passed", "tokens", "forwards"]].sum()
totals["tpf"] = totals["tokens"] / totals["forwards"]  # all tokens by all forwards, as in tables
print(totals.round(2))

figures = results.figures(arguments.runs)
speeds = figures[figures.metric == "tps"]
print(speeds[["system", "task", "value", "ci_low", "ci_high"]].to_string(index=False))

figure, axes = plt.subplots(figsize=(6, 3))
for number, (system, group) in enumerate(samples.groupby("system")):
    axes.scatter(group["tpf"], [number] * len(group), alpha=0.5, label=system)
axes.set(xlabel="tokens per forward", yticks=[])
axes.legend(loc="center right")
figure.tight_layout()
figure.savefig(arguments.out, dpi=150)
print(f"wrote {arguments.out}")
