"""Requests as a queue from outside the tree got them, compared when it admits them.

It gets the core's own objects and may only read them. A changed length would surface in the device, as an error that
names no policy. Cost: one copy of nine fields when a request joins the queue, and nine comparisons when it is admitted.
"""

from typing import Final

from lorrery.scheduler.core.admission import CHECK_IT
from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.compiling import mypyc_attr

ADMITTED_UNKNOWN = f"`admit` admitted a request that does not wait in this queue; {CHECK_IT}"
ADMITTED_BY_HAND = f"`admit` changed `admission.admitted`; requests enter it by `admission.admit` alone; {CHECK_IT}"

FIELDS: Final = (
    "handle", "prompt_tokens", "max_new_tokens", "arrived_ps", "adapter", "tenant_id", "produced_tokens",
    "input_tokens", "budget_tokens",
)  # fmt: skip
"""Fields of a request that do not change while it waits."""


@mypyc_attr(acyclic=True)
class _AsGiven:
    """The `FIELDS` of a sequence as they were when its queue got it."""

    __slots__ = ("sequence", *FIELDS)

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.handle = sequence.handle
        self.prompt_tokens = sequence.prompt_tokens
        self.max_new_tokens = sequence.max_new_tokens
        self.arrived_ps = sequence.arrived_ps
        self.adapter = sequence.adapter
        self.tenant_id = sequence.tenant_id
        self.produced_tokens = sequence.produced_tokens
        self.input_tokens = sequence.input_tokens
        self.budget_tokens = sequence.budget_tokens

    def is_unchanged(self) -> bool:
        """Return whether the sequence is as it was; written out, since it is called for every admission."""
        now = self.sequence
        return (
            now.handle == self.handle
            and now.prompt_tokens == self.prompt_tokens
            and now.max_new_tokens == self.max_new_tokens
            and now.arrived_ps == self.arrived_ps
            and now.adapter is self.adapter
            and now.tenant_id == self.tenant_id
            and now.produced_tokens == self.produced_tokens
            and now.input_tokens == self.input_tokens
            and now.budget_tokens == self.budget_tokens
        )

    def differences(self) -> list[str]:
        """Return the names of the changed fields; `==` of a value of another type is not called."""
        found: list[str] = []
        for name in FIELDS:
            new, old = getattr(self.sequence, name), getattr(self, name)
            if new is not old and (type(new) is not type(old) or new != old):
                found.append(name)
        return found

    def put_back(self) -> list[str]:
        """Undo the changes, and return the names of the changed fields."""
        found = self.differences()
        for name in found:
            setattr(self.sequence, name, getattr(self, name))
        return found


class Given:
    """Requests that were given to a queue, as they were then. What has changed in any of them is put back."""

    __slots__ = ("_given",)

    def __init__(self) -> None:
        self._given: dict[int, _AsGiven] = {}

    def add(self, sequence: Sequence) -> None:
        """Note a sequence before the queue gets it."""
        self._given[sequence.handle] = _AsGiven(sequence)

    def dropped(self, sequence: Sequence) -> None:
        """Forget a sequence that the queue has dropped.

        Raises:
            ValueError: the queue has changed its handle.
        """
        given = self._given.get(sequence.handle)
        if (given is None or given.sequence is not sequence) and self._knows(sequence):
            raise ValueError(changed_fields(["handle"]))
        self._given.pop(sequence.handle, None)

    def _knows(self, sequence: Sequence) -> bool:
        return any(one.sequence is sequence for one in self._given.values())

    def forget(self, handle: int) -> None:
        """Forget a sequence that has left the queue in another way than by `admit`."""
        self._given.pop(handle, None)

    def forget_all(self) -> None:
        """Forget all, since the queue is emptied, and put back what it has changed in them."""
        self.put_back()
        self._given.clear()

    def check(self, admitted: list[Sequence], at_ps: int) -> None:
        """Check the sequences that a pass has admitted, and forget them.

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
        for sequence in admitted:
            del self._given[sequence.handle]

    def put_back(self) -> list[str]:
        """Undo what the queue has changed, so that the sequences can be ended by their handles; return which fields."""
        found: dict[str, None] = {}
        for one in self._given.values():
            for name in one.put_back():
                found[name] = None
        return list(found)


def changed_fields(names: list[str]) -> str:
    """Return the error of a queue that has changed these fields."""
    return f"the queue changed {', '.join(names)} of a request; it may only read requests; {CHECK_IT}"
