"""Terms shared by every room: units of time, endings of requests, changes of adapters, arrays on the wire.

PURE, and the only room that all others may import; it imports none.
"""
