"""The virtual clock over the pure rooms."""

if __name__ != "lorrery.simulator":
    raise ImportError("this is lorrery.simulator: a second copy under the name " + __name__ + " would not be the same")
