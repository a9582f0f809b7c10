"""vLLM's own gRPC protocol (packages `vllm.Inference` and `vllm.Control`) and its stubs; `make protos` writes them."""
