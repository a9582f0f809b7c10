"""Device time is in integer picoseconds."""

from typing import Final

PS_PER_SECOND: Final = 10**12

NEVER: Final = (1 << 62) - 1
"""Later than any time (in picoseconds, 53 days) and more steps than any run has; sums of two still fit 64 bits. No
larger integer is one machine word in the compiled core."""

LAST_SECONDS: Final = NEVER // PS_PER_SECOND
"""The same in seconds: no time in a simulation is later."""

ENDLESS: Final = 1 << 128
"""Later than whatever a live clock shows, which may go beyond `NEVER`."""


def picoseconds(seconds: float) -> int:
    """Return the nearest whole number of picoseconds, of two the even one: as `round` does, without a call of Python's.

    Raises:
        OverflowError: infinite.
        ValueError: no number.
    """
    exact = seconds * PS_PER_SECOND
    whole = int(exact)
    rest = exact - whole
    if rest > 0.5 or (rest == 0.5 and whole % 2):
        return whole + 1
    if rest < -0.5 or (rest == -0.5 and whole % 2):
        return whole - 1
    return whole
