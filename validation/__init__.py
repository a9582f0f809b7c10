"""Compares the models here with measurements, and with the behaviour of other programs."""

if __name__ != "lorrery.validation":
    raise ImportError("this is lorrery.validation: a second copy under the name " + __name__ + " would not be the same")
