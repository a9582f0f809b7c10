"""Where a compiled loop lets Python's signal handlers run.

Python runs them between the instructions of interpreted code, and a loop of compiled code has none: Ctrl-C would wait
for its end. So this module is not compiled, which a test checks.
"""


def let_signals_in() -> None:
    """Be one call of interpreted code."""
