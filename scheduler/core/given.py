"""Requests as a queue from outside the tree got them, compared when it admits or drops them, and when they leave.

It gets the core's own objects and may only read them. A changed length would surface in the device, as an error that
names no policy; a changed time, or a prompt marked as computed, only as false figures. Cost: three copies of the
`FIELDS` for each request (when it joins the queue, is admitted, and has its first token) and as many comparisons;
nothing at a step. So a change that the queue takes back before then is not found; `lorrery validate policy` compares at
each call.
"""

from contextlib import suppress
from operator import attrgetter
from typing import Final

from lorrery.scheduler.core.admission import CHECK_IT
from lorrery.scheduler.core.policy_errors import PolicyErrors
from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.compiling import mypyc_attr

ADMITTED_UNKNOWN = f"`admit` admitted a request that does not wait in this queue; {CHECK_IT}"
ADMITTED_BY_HAND = f"`admit` changed `admission.admitted`; requests enter it by `admission.admit` alone; {CHECK_IT}"

_LASTING: Final = (
    "handle", "prompt_tokens", "max_new_tokens", "arrived_ps", "adapter", "tenant_id", "weight", "priority",
    "cache_salt", "deadline_ps", "produced_tokens", "input_tokens", "budget_tokens", "num_requeues", "cached_tokens",
)  # fmt: skip
"""Fields of a request that do not change while it waits, nor while it runs."""

FIELDS: Final = (
    *_LASTING, "base_step", "entered", "first_admitted_ps", "first_cached_tokens", "first_token_ps", "computed_tokens"
)  # fmt: skip
"""Fields of a request that do not change while it waits, nor while it decodes."""

_values_of: Final = attrgetter(*FIELDS)
_NUM_LASTING: Final = len(_LASTING)
_CACHED: Final = FIELDS.index("cached_tokens")


@mypyc_attr(acyclic=True)
class _AsGiven:
    """The first of the `FIELDS` of a sequence, or all, as they were."""

    __slots__ = ("sequence", "values")

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.values: tuple[object, ...] = _values_of(sequence)

    def is_unchanged(self) -> bool:
        """Return whether the sequence is as it was."""
        now: tuple[object, ...] = _values_of(self.sequence)
        return now[: len(self.values)] == self.values

    def differences(self) -> list[str]:
        """Return the names of the changed fields; `==` of a value of another type is not called."""
        found: list[str] = []
        for name, old in zip(FIELDS, self.values, strict=False):
            new = getattr(self.sequence, name)
            if new is not old and (type(new) is not type(old) or new != old):
                found.append(name)
        return found

    def put_back(self) -> list[str]:
        """Undo the changes, and return the names of the changed fields."""
        found = self.differences()
        for name in found:
            setattr(self.sequence, name, self.values[FIELDS.index(name)])
        return found


class Given:
    """Requests that were given to a queue, as they were then. What has changed in any of them is put back.

    Args:
        errors: receives changes that are found outside a decision.
    """

    __slots__ = ("_errors", "_given", "_running")

    def __init__(self, errors: PolicyErrors) -> None:
        self._given: dict[int, _AsGiven] = {}
        self._running: dict[Sequence, _AsGiven] = {}
        self._errors = errors

    # --- while they wait --------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Note a sequence before the queue gets it."""
        self._given[sequence.handle] = _AsGiven(sequence)

    def dropped(self, sequence: Sequence) -> None:
        """Check a sequence that the queue has dropped, and forget it.

        Raises:
            ValueError: it has changed.
            Exception: of a value that cannot be compared, which is a change too.
        """
        given = self._given.get(sequence.handle)
        if given is None or given.sequence is not sequence:
            if self._knows(sequence):
                raise ValueError(changed_fields(["handle"]))
            return
        if not given.is_unchanged():
            raise ValueError(changed_fields(given.differences()))
        del self._given[sequence.handle]

    def _knows(self, sequence: Sequence) -> bool:
        return any(one.sequence is sequence for one in self._given.values())

    def forget(self, handle: int) -> None:
        """Forget a sequence that has left the queue in another way than by `admit`, and put back what was changed."""
        given = self._given.pop(handle, None)
        if given is not None:
            given.put_back()

    def forget_all(self) -> None:
        """Forget all that wait, since the queue is emptied, and put back what it has changed in them."""
        self.put_back()
        self._given.clear()

    def cached(self, sequence: Sequence, num_tokens: int) -> None:
        """Note how much of the input of a waiting sequence a prefix cache holds."""
        given = self._given.get(sequence.handle)
        if given is not None:
            old = given.values
            given.values = (*old[:_CACHED], num_tokens, *old[_CACHED + 1 : -1], num_tokens)

    def check(self, admitted: list[Sequence], at_ps: int) -> None:
        """Check the sequences that a pass has admitted.

        Raises:
            ValueError: one has changed, is not of this queue, or was not admitted by the pass.
            Exception: of a value that cannot be compared, which is a change too.
        """
        for sequence in admitted:
            given = self._given.get(sequence.handle)
            if given is None or given.sequence is not sequence:
                raise ValueError(changed_fields(["handle"]) if self._knows(sequence) else ADMITTED_UNKNOWN)
            if sequence.admitted_ps != at_ps:
                raise ValueError(ADMITTED_BY_HAND)
            if not given.is_unchanged():
                raise ValueError(changed_fields(given.differences()))

    def put_back(self) -> list[str]:
        """Undo what the queue has changed, so that the sequences can be ended by their handles; return which fields."""
        found: dict[str, None] = {}
        for one in self._given.values():
            for name in one.put_back():
                found[name] = None
        return list(found)

    # --- while they run ---------------------------------------------------------------------------------------------

    def enters(self, sequence: Sequence) -> None:
        """Note a checked sequence that enters the batch."""
        given = self._given.pop(sequence.handle)
        given.values = given.values[:_NUM_LASTING]
        self._running[sequence] = given

    def settle(self, sequence: Sequence) -> None:
        """Put back what the queue has changed in a running sequence, which the next decision raises."""
        given = self._running.get(sequence)
        if given is None:
            return
        with suppress(Exception):  # of a value that cannot be compared, which is a change too
            if given.is_unchanged():
                return
        self._errors.error = ValueError(changed_fields(given.put_back(), "running "))

    def joined(self, sequence: Sequence) -> None:
        """Note a settled sequence that decodes from now on."""
        self._running[sequence] = _AsGiven(sequence)

    def leaves(self, sequence: Sequence) -> None:
        """Settle a sequence that is about to leave the batch, and forget it."""
        self.settle(sequence)
        self._running.pop(sequence, None)


def changed_fields(names: list[str], which: str = "") -> str:
    """Return the error of a queue that has changed these fields."""
    return f"the queue changed {', '.join(names)} of a {which}request; it may only read requests; {CHECK_IT}"
