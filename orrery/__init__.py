"""The orrery: shows a running cluster, given its address, or a simulation's record, given its file."""

if __name__ != "lorrery.orrery":
    raise ImportError("this is lorrery.orrery: a second copy under the name " + __name__ + " would not be the same")
