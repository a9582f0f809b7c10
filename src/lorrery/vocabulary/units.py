"""Device time is in integer picoseconds."""

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
