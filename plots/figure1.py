"""Figure 1: score and throughput against the autoregressive baseline.

python plots/figure1.py results/embedded/results.csv --out figures
"""

import sys

from refusion_eval.cli import main

sys.argv[1:1] = ["plot", "figure1", "--out", "."]
main()
