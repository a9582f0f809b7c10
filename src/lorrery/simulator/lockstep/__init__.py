"""A simulation in lock step with a caller over gRPC: `lorrery.VirtualCluster` as `SimulationService`."""
