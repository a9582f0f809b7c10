"""Device times on the wire: 64 bits, which wrap.

A device time has no bound in a process, where integers have none. A message has 64 bits for it, 213 days of
picoseconds, so it carries the time modulo 2**64, and its receiver takes the one that is nearest to its own clock: right
for every time within 106 days of it. What a message says of the far past or future is cut to `FAR_PS`.
"""

from typing import Final

_SPAN: Final = 1 << 64
_HALF: Final = 1 << 63

FAR_PS: Final = 1 << 62
"""53 days: no time in a message is farther from the clock of its sender."""


def to_wire(at_ps: int) -> int:
    """Return a device time as a signed 64-bit integer."""
    return (at_ps + _HALF) % _SPAN - _HALF


def from_wire(wire_ps: int, near_ps: int) -> int:
    """Return the device time that a message means.

    Args:
        wire_ps: as the message has it.
        near_ps: the receiver's clock now.
    """
    return near_ps + to_wire(wire_ps - near_ps)
