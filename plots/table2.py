"""Table 2: the controlled comparison of training objectives.

python plots/table2.py results/embedded/results.csv --out tables
"""

from refusion_eval.figures.scripts import main

if __name__ == "__main__":
    main("table2", __doc__)
