"""Figure 6: score against tokens per forward.

python plots/figure6.py results/sweeps/mini_figure6 --out figures
"""

import sys

from refusion_eval.cli import main

sys.argv[1:1] = ["plot", "figure6", "--out", "."]
main()
