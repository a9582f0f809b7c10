"""A queue from outside the tree, checked at each call, and what it does to the requests that it was given.

It gets the core's own objects and may only read them. A changed length would surface in the device, as an error that
names no policy; a changed time, or a prompt marked as computed, only as false figures. So requests are compared when
the queue admits or drops them, and when they leave. Cost: three copies of the `FIELDS` for each request (when it joins
the queue, is admitted, and has its first token) and as many comparisons; nothing at a step. So a change that the queue
takes back before then is not found; `lorrery validate policy` compares at each call.
"""

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, Final

from lorrery.scheduler.core.admission import BOTH_ANSWERS, CHECK_IT, STILL_DROPPED, AdmissionPass
from lorrery.scheduler.core.batch import Batch
from lorrery.scheduler.core.checked.base import Checked, PolicyErrors, Waits, a
from lorrery.scheduler.core.facts import Event
from lorrery.scheduler.core.memory.base import Memory
from lorrery.scheduler.core.prefix_cache.base import PrefixCache
from lorrery.scheduler.core.protocols import Queue
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.compiling import mypyc_attr
from lorrery.vocabulary.endings import FinishReason

WAKES_IN_THE_PAST: Final = f"`wakes_at_ps` answered a time that is not later than now; it must be, or None; {CHECK_IT}"
HOLDS_FOR_NOTHING: Final = f"`holds_for` answered less than 1; it must be from 1 to its limit; {CHECK_IT}"
CANCELS_ANOTHER: Final = f"`cancel` answered another request than the one it was asked for; {CHECK_IT}"
ADMITTED_UNKNOWN: Final = f"`admit` admitted a request that does not wait in this queue; {CHECK_IT}"
ADMITTED_BY_HAND: Final = (
    f"`admit` changed `admission.admitted`; requests enter it by `admission.admit` alone; {CHECK_IT}"
)
WAITS: Final = "`wakes_at_ps` answered a time"
CURE: Final = "answer the time from which `admit` decides otherwise, or None: it is called when something arrives"

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
_lasting_of: Final = attrgetter(*_LASTING)
_NUM_LASTING: Final = len(_LASTING)
_CACHED: Final = FIELDS.index("cached_tokens")


@mypyc_attr(acyclic=True)
class _AsGiven:
    """The first of the `FIELDS` of a sequence, or all, as they were."""

    __slots__ = ("sequence", "values")

    def __init__(self, sequence: Sequence, values: tuple[object, ...]) -> None:
        self.sequence = sequence
        self.values = values

    def is_unchanged(self) -> bool:
        """Return whether the sequence is as it was."""
        now: tuple[object, ...] = (_values_of if len(self.values) > _NUM_LASTING else _lasting_of)(self.sequence)
        return now == self.values

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


class CheckedQueue(Checked):
    """A queue that calls one from outside the tree.

    The plug-in is called as `Any`: the compiled core converts what a typed call returns, and would refuse a wrong type
    with a message of its own.

    Attributes:
        admitted: running sequences as they were when they were last compared; kept by the batch (`CheckedBatch`).
    """

    def __init__(self, queue: Queue) -> None:
        super().__init__(queue)
        self._queue: Any = queue
        self._waiting: dict[int, _AsGiven] = {}
        self.admitted: dict[Sequence, _AsGiven] = {}
        self._has_passed_over = False
        self._waits = Waits(WAITS, CURE)
        self._running: Running | None = None
        self._progress = (0, 0, 0)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    def append(self, sequence: Sequence, at_ps: int, *, first: bool = False) -> None:
        """Add a sequence, with `first` ahead of all if the plug-in can do so; note it before the plug-in gets it."""
        queue, handle = self._queue, sequence.handle
        self._waiting[handle] = _AsGiven(sequence, _values_of(sequence))
        try:
            if first and hasattr(queue, "put_first"):
                queue.put_first(sequence, at_ps)
            else:
                queue.append(sequence, at_ps)
        except Exception:
            self._forget(handle)
            raise

    def put_first(self, sequence: Sequence, at_ps: int) -> None:
        """Add a preempted sequence, ahead of all if the plug-in can do so."""
        self.append(sequence, at_ps, first=True)

    def cancel(self, handle: int) -> Sequence | None:
        """Return a cancelled sequence; None: it does not wait, or the plug-in has dropped it but keeps it.

        Raises:
            ValueError: the plug-in returned another one.
        """
        found: Sequence | None = self._queue.cancel(handle)
        if found is None or found.dropped:
            return None
        if found.handle != handle:
            raise ValueError(CANCELS_ANOTHER)
        self._forget(handle)
        self._waits.end()
        return found

    def clear(self) -> list[Sequence]:
        """Remove and return all sequences, with what the plug-in has changed in them put back."""
        self._put_back()
        self._waiting.clear()
        self._waits.all_ended()
        cleared: list[Sequence] = self._queue.clear()
        return cleared

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        """Let the plug-in try its sequences in the pass; return and mark those that it has dropped.

        If this raises, all waiting sequences are as they were given, so that they can be ended by their handles.

        Raises:
            TypeError: the result is no list.
            ValueError: the plug-in has changed a request, or admitted or dropped one that it could not.
            Exception: whatever it raised, or of a value that cannot be compared, which is a change too.
        """
        self._running = running
        pin, pinned = admission.on_take, list[Sequence]()
        if pin is not None:
            admission.on_take = self._noting(pin, pinned)
        try:
            dropped = self._queue.admit(admission, running, at_ps)
            if not isinstance(dropped, list):
                raise TypeError(
                    f"`admit` answered {a(dropped)}; it must be a list, [] if no request is dropped; {CHECK_IT}"
                )
            admitted = admission.admitted
            if admitted:
                self._check_admitted(admitted, at_ps)
            ended = self._take_out(dropped) if dropped else []
        except Exception as error:
            changed = self._put_back()
            for sequence in pinned:
                self._note_cached(sequence, 0)  # as it is once the core has taken it back
            if changed:
                raise ValueError(_changed_fields(changed)) from error  # which most likely caused this error
            raise
        for sequence in admitted:
            given = self._waiting.pop(sequence.handle)
            given.values = given.values[:_NUM_LASTING]
            self.admitted[sequence] = given
        if admitted or ended:
            self._waits.end()
        self._has_passed_over = bool(admission.passed_over)
        return ended

    def _noting(self, pin: Callable[[Sequence], None], pinned: list[Sequence]) -> Callable[[Sequence], None]:
        def pin_and_note(sequence: Sequence) -> None:
            pin(sequence)
            pinned.append(sequence)
            self._note_cached(sequence, sequence.cached_tokens)

        return pin_and_note

    def holds_for(self, running: Running, memory: Memory, limit: int) -> int:
        """Return for how many decode steps `admit` would still admit nothing.

        That is 1 if sequences were passed over: the plug-in may only know of the sequence that ended the pass.

        Raises:
            TypeError: the result is no whole number.
            ValueError: it is less than 1.
        """
        if self._has_passed_over:
            return 1
        answer = self._queue.holds_for(running, memory, limit)
        if not isinstance(answer, int):
            raise TypeError(f"`holds_for` answered {a(answer)}; it must be an int from 1 to its limit; {CHECK_IT}")
        if answer < 1:
            raise ValueError(HOLDS_FOR_NOTHING)
        return answer

    def wakes_at_ps(self, at_ps: int) -> int | None:
        """Return when time alone changes what `admit` would do; the plug-in is not called while it is empty: never.

        Raises:
            TypeError: the result is no whole number.
            ValueError: it is not a later time, or one of too many.
        """
        answer = self._queue.wakes_at_ps(at_ps) if len(self._queue) else None
        if answer is None:
            self._waits.end()
            return None
        if not isinstance(answer, int):
            raise TypeError(f"`wakes_at_ps` answered {a(answer)}; it must be an int (picoseconds) or None; {CHECK_IT}")
        if answer <= at_ps:
            raise ValueError(WAKES_IN_THE_PAST)
        if self._has_run():
            self._waits.end()
        self._waits.add(answer - at_ps)
        return answer

    def _has_run(self) -> bool:
        """Return whether a sequence has joined, left or advanced since the last call."""
        running = self._running
        if running is None:
            return False
        computed_tokens = sum([sequence.computed_tokens for sequence in running.prefilling.values()])
        progress = (running.version, running.decode_step, computed_tokens)
        has_run, self._progress = progress != self._progress, progress
        return has_run

    def at_rest(self) -> bool:
        """Return whether a try would admit nothing and change nothing, whatever the limits, until the next `append`."""
        rests: bool = self._queue.at_rest()
        return rests

    def arrivals_matter(self) -> bool:
        """Return whether one more arrival could change the result of the last `admit`."""
        matters: bool = self._queue.arrivals_matter()
        return matters

    @property
    def arrivals_read_state(self) -> bool:
        """Whether `append` reads state that changes with every step, so that an arrival has to end the segment."""
        reads: bool = self._queue.arrivals_read_state
        return reads

    def look_ahead(self, max_prompt_tokens: int) -> list[Sequence]:
        """Return the sequences that would be next if only the prompt limit counted."""
        ahead: list[Sequence] = self._queue.look_ahead(max_prompt_tokens)
        return ahead

    def decoded(self, running: Running, num_steps: int) -> None:
        """Note that every running sequence decoded `num_steps` tokens."""
        self._queue.decoded(running, num_steps)

    # --- requests that wait -----------------------------------------------------------------------------------------

    def _check_admitted(self, admitted: list[Sequence], at_ps: int) -> None:
        for sequence in admitted:
            given = self._waiting.get(sequence.handle)
            if given is None or given.sequence is not sequence:
                raise ValueError(_changed_fields(["handle"]) if self._knows(sequence) else ADMITTED_UNKNOWN)
            if sequence.admitted_ps != at_ps:
                raise ValueError(ADMITTED_BY_HAND)
            if not given.is_unchanged():
                raise ValueError(_changed_fields(given.differences()))

    def _take_out(self, dropped: list[Sequence]) -> list[Sequence]:
        """Check and mark dropped sequences; return them without those that strict S-LoRA sweeps, which had ended.

        One that the queue was not given is returned too: its worker does not have it, and says so.
        """
        for sequence in dropped:
            given = self._waiting.get(sequence.handle)
            if given is not None and given.sequence is sequence:
                if not given.is_unchanged():
                    raise ValueError(_changed_fields(given.differences()))
                del self._waiting[sequence.handle]
            elif self._knows(sequence):
                raise ValueError(_changed_fields(["handle"]))
        ended = [sequence for sequence in dropped if not sequence.aborted]
        for sequence in ended:
            if sequence.admitted_ps is not None:
                raise ValueError(BOTH_ANSWERS)
            if sequence.dropped:
                raise ValueError(STILL_DROPPED)
            sequence.dropped = True
        return ended

    def _knows(self, sequence: Sequence) -> bool:
        return any(one.sequence is sequence for one in self._waiting.values())

    def _note_cached(self, sequence: Sequence, num_tokens: int) -> None:
        """Note how much of the input of a waiting sequence a prefix cache holds."""
        given = self._waiting.get(sequence.handle)
        if given is not None:
            old = given.values
            given.values = (*old[:_CACHED], num_tokens, *old[_CACHED + 1 : -1], num_tokens)

    def _forget(self, handle: int) -> None:
        """Forget a sequence that leaves the queue in another way than by `admit`, and put back what was changed."""
        given = self._waiting.pop(handle, None)
        if given is not None:
            given.put_back()

    def _put_back(self) -> list[str]:
        """Undo what the plug-in has changed in waiting sequences; return which fields."""
        found: dict[str, None] = {}
        for one in self._waiting.values():
            for name in one.put_back():
                found[name] = None
        return list(found)


class CheckedBatch(Batch):
    """The batch of a checked queue, which may not change what runs: changes are put back before they have an effect.

    Args:
        queue: the queue.
        errors: receives changes, which are errors of the queue, for the next decision.
        memory, prefix_cache: as in `Batch`.
    """

    def __init__(
        self, queue: CheckedQueue, errors: PolicyErrors, memory: Memory, prefix_cache: PrefixCache | None
    ) -> None:
        super().__init__(memory, prefix_cache)
        self._given = queue.admitted
        self._errors = errors

    def remove(self, sequence: Sequence, ahead: int = 0) -> int:
        """Remove a sequence; see `Batch.remove`."""
        self._settle(sequence)
        return super().remove(sequence, ahead)

    def step_aside(self, sequence: Sequence) -> None:
        """Turn a sequence's output into input; see `Batch.step_aside`."""
        super().step_aside(sequence)
        self._given[sequence] = _AsGiven(sequence, _lasting_of(sequence))

    def _sampled(
        self, sequence: Sequence, reason: FinishReason | None, at_ps: int, events: list[Event], *, hold: bool
    ) -> None:
        self._settle(sequence)
        super()._sampled(sequence, reason, at_ps, events, hold=hold)
        if reason is None or hold:
            self._given[sequence] = _AsGiven(sequence, _values_of(sequence))

    def _settle(self, sequence: Sequence) -> None:
        """Put back what the queue has changed in a running sequence since it was noted, and forget it."""
        given = self._given.pop(sequence, None)
        if given is None:
            return
        try:
            is_unchanged = given.is_unchanged()
        except Exception:
            is_unchanged = False  # a value that cannot be compared is a change too
        if not is_unchanged:
            self._errors.error = ValueError(_changed_fields(given.put_back(), "running "))


def _changed_fields(names: list[str], which: str = "") -> str:
    """Return the error of a queue that has changed these fields."""
    return f"the queue changed {', '.join(names)} of a {which}request; it may only read requests; {CHECK_IT}"
