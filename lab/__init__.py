"""What only measures or generates: benchmarks, studies, and what writes dashboards, pages and pictures.

Run from the checkout, `python -m lab.bench`. It is no part of the wheel, and the product imports nothing of it.
"""
