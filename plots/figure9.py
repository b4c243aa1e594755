"""Figure 9: decoding step by step.

python plots/figure9.py figures/figure9_mini.csv --out figures
"""

from refusion_eval.figures.scripts import main

if __name__ == "__main__":
    main("figure9", __doc__)
