"""Figure 4: sweeps of tau_slot, tau_token and the slot size.

python plots/figure4.py results/sweeps/mini_figure4 --out figures
"""

import sys

from refusion_eval.cli import main

sys.argv[1:1] = ["plot", "figure4", "--out", "."]
main()
