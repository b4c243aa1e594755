"""Figure 8: sweep of the block size.

python plots/figure8.py results/sweeps/mini_figure8 --out figures
"""

from refusion_eval.figures.scripts import main

if __name__ == "__main__":
    main("figure8", __doc__)
