"""Terms shared by every room: units of time, finish reasons, arrays on the wire.

PURE, and the only room that all others may import; it imports none.
"""

if __name__ != "lorrery.vocabulary":
    raise ImportError("this is lorrery.vocabulary: a second copy under the name " + __name__ + " would not be the same")
