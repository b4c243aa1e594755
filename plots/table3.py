"""Table 3: the controlled comparison with Dream.

python plots/table3.py results/embedded/results.csv --out tables
"""

import sys

from refusion_eval.cli import main

sys.argv[1:1] = ["paper-table", "3", "--out", "."]
main()
