"""Table 5: designs of masked diffusion models.

python plots/table5.py --out tables
"""

import sys

from refusion_eval.cli import main

sys.argv[1:1] = ["paper-table", "5", "--out", "."]
main()
