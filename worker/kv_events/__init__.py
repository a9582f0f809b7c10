"""KV events of a worker, published over ZeroMQ in vLLM's format: see docs/gateways.md."""
