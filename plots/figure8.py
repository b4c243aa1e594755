"""Figure 8: sweep of the block size.

python plots/figure8.py results/sweeps/mini_figure8 --out figures
"""

import sys

from refusion_eval.cli import main

sys.argv[1:1] = ["plot", "figure8", "--out", "."]
main()
