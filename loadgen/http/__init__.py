"""HTTP clients of the load generator: OpenAI's and S-LoRA's routes, for any server."""
