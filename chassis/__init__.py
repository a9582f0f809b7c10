"""What every process of the cluster shares: settings, logging, metrics, gRPC server and channel, drain."""

if __name__ != "lorrery.chassis":
    raise ImportError("this is lorrery.chassis: a second copy under the name " + __name__ + " would not be the same")
