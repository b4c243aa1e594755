"""Table 7: ReFusion beside closed and other models.

python plots/table7.py results/embedded/results.csv --out tables
"""

import sys

from refusion_eval.cli import main

sys.argv[1:1] = ["paper-table", "7", "--out", "."]
main()
