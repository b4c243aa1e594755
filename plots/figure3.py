"""Figure 3: what a revealed token changes, by distance.

python plots/figure3.py locality.csv --out figures
"""

from refusion_eval.figures.scripts import main

if __name__ == "__main__":
    main("figure3", __doc__)
