"""Table 6: settings of ReFusion by benchmark.

python plots/table6.py results/embedded/results.csv --out tables
"""

import sys

from refusion_eval.cli import main

sys.argv[1:1] = ["paper-table", "6", "--out", "."]
main()
