"""`lorrery load`: sends a workload to a cluster by its address. The command is defined in `loadgen`."""

from lorrery.loadgen.command import app, load

__all__ = ["app", "load"]
