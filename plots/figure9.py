"""Figure 9: decoding step by step.

python plots/figure9.py figures/figure9_mini.csv --out figures
"""

import sys

from refusion_eval.cli import main

sys.argv[1:1] = ["plot", "figure9", "--out", "."]
main()
