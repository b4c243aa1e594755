"""Table 1: score and throughput of all systems.

python plots/table1.py results/embedded/results.csv --out tables
"""

import sys

from refusion_eval.cli import main

sys.argv[1:1] = ["paper-table", "1", "--out", "."]
main()
