"""`lorrery serve`: runs one engine that answers like `vllm serve`, with the flags of vLLM and of its stand-ins.

`flags.py` and `other_flags.toml` are the tables of flags, `settings.py` turns flags into settings, `run.py` runs them.
"""

from lorrery.cli.serve.command import app

__all__ = ["app"]
