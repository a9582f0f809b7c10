"""PURE: how many workers a rule wants, given what a scraper has seen of a cluster; the same live and simulated.

`figures.py` makes a metric's value of samples as one scrapes them, `rule.py` decides. Neither has a clock.
"""

if __name__ != "lorrery.autoscaler":
    raise ImportError("this is lorrery.autoscaler: a second copy under the name " + __name__ + " would not be the same")
