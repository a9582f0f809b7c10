"""Device times on the wire: 64 bits, which wrap.

A device time has no bound within a process, where integers have none. A message has 64 bits for it, 213 days of
picoseconds, so it carries the time modulo 2**64, and the receiver takes the value nearest to its own clock: right for
every time within 106 days of it. Times in the far past or future are cut to `FAR_PS`.
"""

from typing import Final

_SPAN: Final = 1 << 64
_HALF: Final = 1 << 63

FAR_PS: Final = 1 << 62
"""53 days: no time in a message is further from its sender's clock."""


def to_wire(at_ps: int) -> int:
    """Return a device time as a signed 64-bit integer."""
    return (at_ps + _HALF) % _SPAN - _HALF


def from_wire(wire_ps: int, near_ps: int) -> int:
    """Return the device time for a time in a message.

    Args:
        wire_ps: from the message.
        near_ps: the receiver's clock now.
    """
    return near_ps + to_wire(wire_ps - near_ps)
