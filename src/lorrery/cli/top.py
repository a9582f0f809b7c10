"""`lorrery top`: shows a cluster or a record in the terminal. The command is defined in `orrery`."""

from lorrery.view.top.command import app, top

__all__ = ["app", "top"]
