"""A simulation in lock step with a caller over gRPC: `lorrery.VirtualCluster` as `SimulationService`."""

if __name__ != "lorrery.lockstep":
    raise ImportError("this is lorrery.lockstep: a second copy under the name " + __name__ + " would not be the same")
