"""Lets Python's signal handlers run inside a compiled loop.

Python runs them between the instructions of interpreted code, and a compiled loop has none: Ctrl-C would wait for its
end. So this module is not compiled, which a test checks.
"""


def let_signals_in() -> None:
    """Execute one call of interpreted code."""
