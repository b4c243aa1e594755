"""Table 1: score and throughput of all systems.

python plots/table1.py results/embedded/results.csv --out tables
"""

from refusion_eval.figures.scripts import main

if __name__ == "__main__":
    main("table1", __doc__)
