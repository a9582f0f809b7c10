"""Validates fault rules that arrive in calls."""

from collections.abc import Container, Iterable, Sequence

from lorrery.service.errors import InvalidRequest, SettingsError
from lorrery.service.faults.kinds import REQUEST_KINDS, Fault, check_faults, parse_fault

MAX_RULES = 64
"""Upper bound on the rules of all of an operator's calls, or of one request."""


def read_rules(texts: Sequence[str], field: str, kinds: Container[str] | None = None) -> list[Fault]:
    """Parse the rules of a call.

    Args:
        texts: one rule each.
        field: name of their field.
        kinds: kinds that are allowed; None: all.

    Raises:
        InvalidRequest: there are too many rules, one is invalid, or two conflict.
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


def further(faults: Iterable[Fault], held: Sequence[Fault], from_ps: int = 0) -> list[Fault]:
    """Return the new ones among an operator's further faults; a fault in force stays unchanged.

    Args:
        faults: of the call.
        held: faults of previous calls, with times on the clock of `from_ps`.
        from_ps: origin of the new faults' times.

    Raises:
        InvalidRequest: two conflict.
    """
    known = {fault.text for fault in held}
    new = [fault for fault in faults if fault.text not in known]
    timed = [*held, *(fault.begun_at(from_ps) for fault in new)]
    try:
        check_faults(timed, adapters={fault.adapter for fault in timed})
    except SettingsError as error:
        raise InvalidRequest(f"rules: {error}", field="rules") from None
    return new


def check_number(num_held: int, num_new: int) -> None:
    """Check the total number of an operator's rules.

    Raises:
        InvalidRequest: it exceeds `MAX_RULES`.
    """
    if num_held + num_new > MAX_RULES:
        raise InvalidRequest(
            f"rules: {num_held} faults hold and {num_new} are to be added; at most {MAX_RULES} at once; take the"
            " others' place with a call that does not add, or with none",
            field="rules",
            value=num_held + num_new,
            limit=MAX_RULES,
        )
