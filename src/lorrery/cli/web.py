"""`lorrery web`: shows a cluster by its address, or a record, in the browser. The command is defined in `orrery`."""

from lorrery.view.command import app, web

__all__ = ["app", "web"]
