"""Device time: integer picoseconds in a process, 64 bits that wrap on the wire.

Within a process a device time has no bound. A message has 64 bits for it, 213 days of picoseconds, so it carries the
time modulo 2**64, and the receiver takes the value nearest to its own clock: right for every time within 106 days of
it. Times in the far past or future are cut to `FAR_PS`.
"""

from typing import Final

PS_PER_SECOND: Final = 10**12

NEVER: Final = (1 << 62) - 1
"""Later than any time (in picoseconds, 53 days) and more steps than any run has; sums of two still fit 64 bits.

No larger integer is one machine word in the compiled core.
"""

LAST_SECONDS: Final = NEVER // PS_PER_SECOND
"""`NEVER` in seconds: no time in a simulation is later."""

ENDLESS: Final = 1 << 128
"""Later than any time of a live clock, which may exceed `NEVER`."""


def picoseconds(seconds: float) -> int:
    """Return the nearest whole number of picoseconds, ties to even: as `round`, without a call into Python.

    Raises:
        OverflowError: infinite.
        ValueError: not a number.
    """
    exact = seconds * PS_PER_SECOND
    whole = int(exact)
    rest = exact - whole
    if rest > 0.5 or (rest == 0.5 and whole % 2):
        return whole + 1
    if rest < -0.5 or (rest == -0.5 and whole % 2):
        return whole - 1
    return whole


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
