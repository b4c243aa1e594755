"""Table 4: reuse of keys and values against their recomputation.

python plots/table4.py results/embedded/results.csv --out tables
"""

from refusion_eval.figures.scripts import main

if __name__ == "__main__":
    main("table4", __doc__)
