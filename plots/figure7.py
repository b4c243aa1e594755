"""Figure 7: scaling with training data.

python plots/figure7.py scaling.csv --out figures
"""

from refusion_eval.figures.scripts import main

if __name__ == "__main__":
    main("figure7", __doc__)
