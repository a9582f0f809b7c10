"""`lorrery load`: drives a cluster by its address. The load generator owns the command."""

from lorrery.loadgen.command import app, load

__all__ = ["app", "load"]
