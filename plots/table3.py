"""Table 3: the controlled comparison with Dream.

python plots/table3.py results/embedded/results.csv --out tables
"""

from refusion_eval.figures.scripts import main

if __name__ == "__main__":
    main("table3", __doc__)
