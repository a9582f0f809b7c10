"""The client side of a cluster: what clients call, and the streams to the schedulers behind it."""
