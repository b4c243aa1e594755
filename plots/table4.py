"""Table 4: reuse of keys and values against their recomputation.

python plots/table4.py results/embedded/results.csv --out tables
"""

import sys

from refusion_eval.cli import main

sys.argv[1:1] = ["paper-table", "4", "--out", "."]
main()
