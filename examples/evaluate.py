"""Evaluates two embedded systems on a few items of two mini tasks, and prints one table of both.

python examples/evaluate.py [FOLDER]
"""

import sys
from pathlib import Path

from refusion_eval.evaluation.loop import evaluate
from refusion_eval.results.measured import run_measurements
from refusion_eval.results.tables import summary, summary_table
from refusion_eval.runs.model_args import parse_model_args

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/example")
runs = []
for decoder in ("refusion", "autoregressive"):
    run_dir = folder / decoder
    arguments = parse_model_args({"pretrained": "embedded", "decoder": decoder, "run_dir": str(run_dir)})
    outcome = evaluate(arguments, ["mini_gsm8k", "mini_arc_challenge"], limit=4)
    print(f"{decoder}: {'complete' if outcome.is_complete else 'incomplete'}, in {run_dir}")
    runs.append(run_dir)

print(summary_table(summary(run_measurements(runs))).markdown())
