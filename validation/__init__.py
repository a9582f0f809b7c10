"""Holds what is modelled here against what was measured, and against what other programs did."""

if __name__ != "lorrery.validation":
    raise ImportError("this is lorrery.validation: a second copy under the name " + __name__ + " would not be the same")
