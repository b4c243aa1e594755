"""Figure 7: scaling with training data.

python plots/figure7.py scaling.csv --out figures
"""

import sys

from refusion_eval.cli import main

sys.argv[1:1] = ["plot", "figure7", "--out", "."]
main()
