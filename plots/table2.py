"""Table 2: the controlled comparison of training objectives.

python plots/table2.py results/embedded/results.csv --out tables
"""

import sys

from refusion_eval.cli import main

sys.argv[1:1] = ["paper-table", "2", "--out", "."]
main()
