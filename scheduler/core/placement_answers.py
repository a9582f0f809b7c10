"""Checks of a placement from outside the tree, made where the core calls it.

It gets the core's own request object, and may only read it: a changed length would surface in the device, as an error
that names no policy. So every change is undone, and having made one is an error of the placement, as if it had raised.
Placements of the tree are not checked; their tests do it.
"""

from collections.abc import Sequence as Many
from dataclasses import fields
from operator import attrgetter
from typing import Any, Final

from lorrery.scheduler.core.placements.base import Candidate, Choice
from lorrery.scheduler.core.protocols.placement import Placement
from lorrery.scheduler.core.sequence import Sequence

CHECK_IT = "check it: `lorrery validate policy --part placement`"
"""Ends the messages about a placement's wrong results."""

FIELDS: Final = tuple(field.name for field in fields(Sequence) if field.name != "content")
"""Fields of a request that are compared; `content` is excluded, as `cached_tokens` of a candidate may set it."""

fields_of = attrgetter(*FIELDS)
"""Returns the values of these fields of a request."""


def choice_of(placement: Placement, sequence: Sequence, candidates: Many[Candidate]) -> Choice:
    """Call a placement from outside the tree.

    Raises:
        TypeError: its result is no `Choice`.
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
    """Restore the fields of a request to the values in `before`; return the names of those that had changed."""
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
