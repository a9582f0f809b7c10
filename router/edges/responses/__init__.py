"""OpenAI's Responses, as vLLM answers them: text only, and nothing is kept."""
