"""How any process of the cluster lives: settings, logging, metrics, gRPC server and channel, drain."""
