"""Figure 3: what a revealed token changes, by distance.

python plots/figure3.py locality.csv --out figures
"""

import sys

from refusion_eval.cli import main

sys.argv[1:1] = ["plot", "figure3", "--out", "."]
main()
