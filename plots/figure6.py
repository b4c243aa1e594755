"""Figure 6: score against tokens per forward.

python plots/figure6.py results/sweeps/mini_figure6 --out figures
"""

from refusion_eval.figures.scripts import main

if __name__ == "__main__":
    main("figure6", __doc__)
