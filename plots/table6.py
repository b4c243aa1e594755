"""Table 6: settings of ReFusion by benchmark.

python plots/table6.py results/embedded/results.csv --out tables
"""

from refusion_eval.figures.scripts import main

if __name__ == "__main__":
    main("table6", __doc__)
