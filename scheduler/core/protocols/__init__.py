"""Protocols of plug-ins: a queue, a way to batch, a placement (docs/plug-ins.md).

Not compiled, since no class outside could derive from a compiled one.
"""
