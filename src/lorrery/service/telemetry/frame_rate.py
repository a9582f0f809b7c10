"""The rate at which a watcher of a cluster may request its state."""

from typing import Final

from lorrery.service.errors import InvalidRequest

MIN_HZ: Final = 1.0
MAX_HZ: Final = 20.0
USUAL_HZ: Final = 10.0
"""Frames per wall second."""


def checked_hz(hz: float) -> float:
    """Return the rate to use; 0 selects the usual one.

    Raises:
        InvalidRequest: it is out of range.
    """
    if not hz:
        return USUAL_HZ
    if not MIN_HZ <= hz <= MAX_HZ:  # also rejects NaN
        raise InvalidRequest(
            f"hz is {hz:g}; it must be from {MIN_HZ:g} to {MAX_HZ:g}, or 0 for {USUAL_HZ:g}",
            field="hz",
            value=hz,
            limit=MAX_HZ,
        )
    return hz
