"""`--failure-injection-rate`: requests that fail at once, in words of Lorrery's faults.

Of several kinds each is as frequent. Rules are tried in turn, and a request that met one meets no other, so that the
i-th of k kinds at a rate p takes (p / k) / (1 - i p / k) of the requests that are left.
"""

from collections.abc import Sequence
from fractions import Fraction

from lorrery.chassis.errors import SettingsError

KINDS = {
    "rate_limit": "RESOURCE_EXHAUSTED",
    "invalid_api_key": "UNAUTHENTICATED",
    "context_length": "OUT_OF_RANGE",
    "server_error": "INTERNAL",
    "invalid_request": "INVALID_ARGUMENT",
    "model_not_found": "NOT_FOUND",
}
"""Name of a failure -> gRPC status, and so HTTP's."""
_DIGITS = 12


def refusals(percent: float, kinds: Sequence[str], seed: int) -> list[str]:
    """Return the faults that let so many requests in a hundred fail.

    Args:
        percent: above 0.
        kinds: how they fail; empty: each of `KINDS`.
        seed: of the draws.

    Raises:
        SettingsError: more than all, or a kind that there is not.
    """
    if percent > 100:
        raise SettingsError(f"--failure-injection-rate {percent:g}: it is a percentage, at most 100")
    for kind in kinds:
        if kind not in KINDS:
            raise SettingsError(f"--failure-types {kind}: it must be one of {', '.join(KINDS)}")
    kinds = list(dict.fromkeys(kinds)) or list(KINDS)
    each = Fraction(str(percent)) / 100 / len(kinds)
    rules: list[str] = []
    for index, kind in enumerate(kinds):
        share = f"{float(each / (1 - index * each)):.{_DIGITS}f}".rstrip("0").rstrip(".")
        drawn = "" if share == "1" else f",share={share},seed={seed + index}"
        rules.append(f"refuse,status={KINDS[kind]}{drawn}")
    return rules
