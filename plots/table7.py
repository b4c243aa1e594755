"""Table 7: ReFusion beside closed and other models.

python plots/table7.py results/embedded/results.csv --out tables
"""

from refusion_eval.figures.scripts import main

if __name__ == "__main__":
    main("table7", __doc__)
