"""What listens and dials: gRPC server and channel, HTTP server, TLS, names of hosts, what a peer may do."""
