"""The load generator: drives a live cluster, measures as its client would, and reports."""

if __name__ != "lorrery.loadgen":
    raise ImportError("this is lorrery.loadgen: a second copy under the name " + __name__ + " would not be the same")
