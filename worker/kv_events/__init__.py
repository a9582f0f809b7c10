"""KV events of a worker, published over ZeroMQ as vLLM's: see docs/kv-events.md."""
