"""The scheduler: forms batches for attached workers. `core/` decides, the rest carries."""

if __name__ != "lorrery.scheduler":
    raise ImportError("this is lorrery.scheduler: a second copy under the name " + __name__ + " would not be the same")
