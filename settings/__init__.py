"""The contents of a settings file: the sections of every service, and the constraints between them."""

if __name__ != "lorrery.settings":
    raise ImportError("this is lorrery.settings: a second copy under the name " + __name__ + " would not be the same")

from lorrery.settings.cluster import Settings, changed, load, origins

__all__ = ["Settings", "changed", "load", "origins"]
