"""How every plot looks and is written: `style.py`. What is plotted stays with its owner (sweeps, plan, studies)."""

if __name__ != "lorrery.plots":
    raise ImportError("this is lorrery.plots: a second copy under the name " + __name__ + " would not be the same")
