"""The `lorrery` command."""

if __name__ != "lorrery.cli":
    raise ImportError("this is lorrery.cli: a second copy under the name " + __name__ + " would not be the same")
