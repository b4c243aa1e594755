"""Figure 1: score and throughput against the autoregressive baseline.

python plots/figure1.py results/embedded/results.csv --out figures
"""

from refusion_eval.figures.scripts import main

if __name__ == "__main__":
    main("figure1", __doc__)
