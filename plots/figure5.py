"""Figure 5: the order of generation on the text.

python plots/figure5.py figures/figure5_mini.csv --out figures
"""

from refusion_eval.figures.scripts import main

if __name__ == "__main__":
    main("figure5", __doc__)
