"""How often somebody who watches a cluster may ask for its state."""

from typing import Final

from lorrery.chassis.errors import InvalidRequest

MIN_HZ: Final = 1.0
MAX_HZ: Final = 20.0
USUAL_HZ: Final = 10.0
"""Frames a second, wall time."""


def checked_hz(hz: float) -> float:
    """Return the rate that is meant; 0: the usual one.

    Raises:
        InvalidRequest: it is out of range.
    """
    if not hz:
        return USUAL_HZ
    if not MIN_HZ <= hz <= MAX_HZ:  # nor is it NaN
        raise InvalidRequest(
            f"hz is {hz:g}; it must be from {MIN_HZ:g} to {MAX_HZ:g}, or 0 for {USUAL_HZ:g}",
            field="hz",
            value=hz,
            limit=MAX_HZ,
        )
    return hz
