"""Anthropic's Messages, as vLLM answers them: text only."""
