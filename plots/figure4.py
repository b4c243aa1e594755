"""Figure 4: sweeps of tau_slot, tau_token and the slot size.

python plots/figure4.py results/sweeps/mini_figure4 --out figures
"""

from refusion_eval.figures.scripts import main

if __name__ == "__main__":
    main("figure4", __doc__)
