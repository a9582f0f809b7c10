"""The client side of a cluster: what clients call, and the streams to the schedulers behind it."""

if __name__ != "lorrery.router":
    raise ImportError("this is lorrery.router: a second copy under the name " + __name__ + " would not be the same")
