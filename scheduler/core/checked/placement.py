"""A placement from outside the tree, checked at each call.

It gets the core's own request object, and may only read it: a changed length would surface in the device, as an error
that names no policy. So every change is undone, and having made one is an error of the placement, as if it had raised.
"""

from collections.abc import Sequence as Many
from dataclasses import fields
from operator import attrgetter
from typing import Any, Final

from lorrery.scheduler.core.checked.base import Checked, a
from lorrery.scheduler.core.placements.base import Choice
from lorrery.scheduler.core.placements.candidate import Candidate
from lorrery.scheduler.core.placements.table import Placement
from lorrery.scheduler.core.sequence import Sequence

CHECK_IT = "check it: `lorrery validate policy --part placement`"
"""Ends the messages about a placement's wrong results."""

FIELDS: Final = tuple(field.name for field in fields(Sequence) if field.name != "content")
"""Fields of a request that are compared; `content` is excluded, as `cached_tokens` of a candidate may set it."""

fields_of = attrgetter(*FIELDS)
"""Returns the values of these fields of a request."""


class CheckedPlacement(Checked):
    """A placement that calls one from outside the tree, and has its attributes."""

    def __init__(self, placement: Placement) -> None:
        super().__init__(placement)
        self._placement: Any = placement
        self.predicts = bool(getattr(placement, "predicts", False))
        self.moves_waiting = bool(getattr(placement, "moves_waiting", False))
        self.asks_all = bool(getattr(placement, "asks_all", False))

    def place(self, sequence: Sequence, candidates: Many[Candidate]) -> Choice:
        """Choose one of the candidates.

        Raises:
            TypeError: the result is no `Choice`.
            ValueError: the placement changed the request.
            Exception: whatever it raised.
        """
        before = fields_of(sequence)
        try:
            choice = self._placement.place(sequence, candidates)
        finally:
            changed = put_back(sequence, before)
        if changed:
            raise ValueError(f"`place` changed the request's {', '.join(changed)}; it may only look; {CHECK_IT}")
        if not isinstance(choice, Choice):
            raise TypeError(f"`place` answered {a(choice)}; it must be a Choice(candidate, why); {CHECK_IT}")
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
