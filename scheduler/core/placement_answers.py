"""What a placement from outside the tree does and answers, checked where the core asks it.

It is handed the request itself, as the core has it, and may only look: a length that it changed would come to light in
the device, as an error that names nobody. So whatever it changes is put back, and that it did is an error of its own,
as if it had raised. Placements of ours are not checked; their tests do it.
"""

from collections.abc import Sequence as Many
from dataclasses import fields
from operator import attrgetter
from typing import Any, Final

from lorrery.scheduler.core.placements.base import Candidate, Choice
from lorrery.scheduler.core.protocols.placement import Placement
from lorrery.scheduler.core.sequence import Sequence

CHECK_IT = "check it: `lorrery validate policy --part placement`"
"""Ends what is said of a placement's answers."""

FIELDS: Final = tuple(field.name for field in fields(Sequence) if field.name != "content")
"""Of a request; `content` is looked up when a candidate is asked for what it has cached."""

fields_of = attrgetter(*FIELDS)
"""The values of these fields of a request."""


def choice_of(placement: Placement, sequence: Sequence, candidates: Many[Candidate]) -> Choice:
    """Let a placement from outside choose.

    Raises:
        TypeError: its answer is no `Choice`.
        ValueError: it changed the request.
        Exception: whatever it raised.
    """
    policy: Any = placement
    before = fields_of(sequence)
    try:
        choice = policy.place(sequence, candidates)
    finally:
        changed = put_back(sequence, before)
    if changed:
        raise ValueError(f"`place` changed the request's {', '.join(changed)}; it may only look; {CHECK_IT}")
    if not isinstance(choice, Choice):
        what = "None" if choice is None else f"a {type(choice).__name__}"
        raise TypeError(f"`place` answered {what}; it must be a Choice(candidate, why); {CHECK_IT}")
    return choice


def put_back(sequence: Sequence, before: tuple[object, ...]) -> list[str]:
    """Give the fields of a request back the values that they had; return the names of those that had changed."""
    after = fields_of(sequence)
    changed = [
        name
        for name, old, new in zip(FIELDS, before, after, strict=True)
        if old is not new and not (isinstance(old, int) and type(old) is type(new) and old == new)
    ]
    if changed:
        was = dict(zip(FIELDS, before, strict=True))
        for name in changed:
            setattr(sequence, name, was[name])
    return changed
