"""PURE: the number of workers that a rule wants, given scraped samples of a cluster; the same live and simulated.

`figures.py` computes a metric's value from samples, `rule.py` decides. Neither has a clock.
"""
