"""`lorrery web`: shows a cluster by its address, or a record. The orrery owns the command."""

from lorrery.orrery.command import app, web

__all__ = ["app", "web"]
