"""A cluster of real processes on this machine."""

if __name__ != "lorrery.local":
    raise ImportError("this is lorrery.local: a second copy under the name " + __name__ + " would not be the same")
