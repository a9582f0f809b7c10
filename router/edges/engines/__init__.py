"""The router as an inference engine: the gRPC protocols that gateways use with vLLM and SGLang.

Each protocol has its own port. All of them use the same handler as the router's own gRPC and HTTP.

| file | contents |
|---|---|
| `engine.py` | what all protocols share: authentication, names, load, adapters, the tokenizer's files |
| `generation.py` | one request of n outputs, and what ends it |
| `reading.py` | what all protocols refuse or leave out; each protocol's names for fields in errors |
| `vllm.py` | vLLM's own: `vllm.Inference`, `vllm.Control` |
| `smg.py`, `smg_vllm.py`, `smg_sglang.py` | `vllm.grpc.engine.VllmEngine`, `sglang.grpc.scheduler.SglangScheduler` |
"""
