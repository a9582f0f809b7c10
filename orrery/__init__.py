"""The orrery: shows a cluster as it runs, or a simulation's record, by its address or its file only."""

if __name__ != "lorrery.orrery":
    raise ImportError("this is lorrery.orrery: a second copy under the name " + __name__ + " would not be the same")
