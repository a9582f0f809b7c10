"""`--failure-injection-rate`: turns requests that fail at once into Lorrery's fault rules.

Several kinds are equally frequent. Rules are tried in turn, and a request that met one meets no other, so the i-th of k
kinds at a rate p takes (p / k) / (1 - i p / k) of the remaining requests.
"""

from collections.abc import Sequence
from fractions import Fraction

from lorrery.service.errors import SettingsError

KINDS = {
    "rate_limit": "RESOURCE_EXHAUSTED",
    "invalid_api_key": "UNAUTHENTICATED",
    "context_length": "OUT_OF_RANGE",
    "server_error": "INTERNAL",
    "invalid_request": "INVALID_ARGUMENT",
    "model_not_found": "NOT_FOUND",
}
"""Failure name -> gRPC status, which determines the HTTP status."""
_DIGITS = 12


def refusals(percent: float, kinds: Sequence[str], seed: int) -> list[str]:
    """Return fault rules that make this percentage of requests fail.

    Args:
        percent: above 0.
        kinds: how they fail; empty: every kind of `KINDS`.
        seed: of the draws.

    Raises:
        SettingsError: more than 100 percent, or an unknown kind.
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
