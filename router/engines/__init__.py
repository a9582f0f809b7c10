"""The router as an inference engine: the gRPC protocols that gateways speak with vLLM and SGLang.

Each protocol has a port of its own. Behind all of them is the handler that the router's own gRPC and HTTP have.

| file | what |
|---|---|
| `ports.py` | which protocols listen where |
| `engine.py`, `load.py` | what an engine is to every protocol: who calls, what it serves, its load, its adapters |
| `generation.py` | one request of n outputs, and what ends it |
| `reading.py` | what all protocols refuse or leave out |
| `field_names.py` | what each protocol calls the fields that errors speak of |
| `vllm.py`, `vllm_control.py` | vLLM's own: `vllm.Inference`, `vllm.Control` |
| `smg.py`, `smg_vllm.py`, `smg_sglang.py` | `vllm.grpc.engine.VllmEngine`, `sglang.grpc.scheduler.SglangScheduler` |
| `smg_kv_events.py` | what both say of the prefix cache |
| `tokenizer_files.py` | the tokenizer's folder, as a path and as an archive |
"""
