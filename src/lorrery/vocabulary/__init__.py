"""Terms shared by every room: units of time, finish reasons, arrays on the wire.

PURE, and the only room that all others may import; it imports none.
"""
