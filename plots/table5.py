"""Table 5: designs of masked diffusion models.

python plots/table5.py --out tables
"""

from refusion_eval.figures.scripts import main

if __name__ == "__main__":
    main("table5", __doc__)
