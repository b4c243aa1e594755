"""Figure 5: the order of generation on the text.

python plots/figure5.py figures/figure5_mini.csv --out figures
"""

import sys

from refusion_eval.cli import main

sys.argv[1:1] = ["plot", "figure5", "--out", "."]
main()
