"""The shipped code against what other programs did: golden records, measured steps, recorded runs."""

if __name__ != "lorrery.validation":
    raise ImportError("this is lorrery.validation: a second copy under the name " + __name__ + " would not be the same")
