"""`lorrery top`: shows a cluster, or a record, in the terminal. The orrery owns the command."""

from lorrery.orrery.top.command import app, top

__all__ = ["app", "top"]
