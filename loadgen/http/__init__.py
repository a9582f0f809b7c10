"""HTTP clients of the load generator: OpenAI's and S-LoRA's routes, of any server."""
