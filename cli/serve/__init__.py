"""`lorrery serve`: one engine that answers like `vllm serve`, under the flags of vLLM and of its stand-ins.

`flags.py` and `not_taken.py` are the tables of flags, `settings.py` says what they amount to, `run.py` runs it.
"""

from lorrery.cli.serve.command import app

__all__ = ["app"]
