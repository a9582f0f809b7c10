"""Faults on request as calls bring them."""

from collections.abc import Container, Sequence

from lorrery.chassis.errors import InvalidRequest, SettingsError
from lorrery.chassis.faults import REQUEST_KINDS, Fault, check_faults, parse_fault

MAX_RULES = 64
"""Most rules of one call of an operator, or of one request."""


def read_rules(texts: Sequence[str], field: str, kinds: Container[str] | None = None) -> list[Fault]:
    """Read the rules of a call.

    Args:
        texts: one each.
        field: where they stand.
        kinds: those that may; None: all.

    Raises:
        InvalidRequest: too many, one is none, or two do not go together.
    """
    if len(texts) > MAX_RULES:
        raise InvalidRequest(
            f"{field} has {len(texts)} faults; at most {MAX_RULES} at once",
            field=field,
            value=len(texts),
            limit=MAX_RULES,
        )
    try:
        faults = [parse_fault(text) for text in texts]
        check_faults(faults, adapters={fault.adapter for fault in faults})
    except SettingsError as error:
        raise InvalidRequest(f"{field}: {error}", field=field) from None
    for fault in faults:
        if kinds is not None and fault.kind not in kinds:
            what = "no fault of requests" if fault.kind not in REQUEST_KINDS else "a fault of requests"
            raise InvalidRequest(f"{field}: fault {fault.text}: {fault.kind} is {what}", field=field)
    return faults
