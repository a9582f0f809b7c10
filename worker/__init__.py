"""The worker: a mock GPU on the wall clock, attached to one scheduler."""

if __name__ != "lorrery.worker":
    raise ImportError("this is lorrery.worker: a second copy under the name " + __name__ + " would not be the same")
