"""What every process of the cluster shares: settings, logging, metrics, gRPC server and channel, drain."""
