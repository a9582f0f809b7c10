"""Checks of what policies from outside the tree return, made where the core reads it.

A senseless result would surface far from the policy, in a device that knows nothing of it, or not at all: a queue that
wakes at the present time would be called for ever. So it is an error of the policy, as if it had raised. The messages
name no request, so that each is logged once. The tree's own policies are not checked: tests and types do it.

The compiled core converts what a typed call returns, and would refuse a wrong type with a message of its own. So a
policy from outside is called as `Any`, and gets the same message whether or not the core is compiled.
"""

from typing import Any, Final

from lorrery.scheduler.core.admission import CHECK_IT, AdmissionPass
from lorrery.scheduler.core.batching.base import Step, Wait
from lorrery.scheduler.core.memory.base import Memory
from lorrery.scheduler.core.protocols.queue import Queue
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.vocabulary.compiling import mypyc_attr
from lorrery.vocabulary.units import PS_PER_SECOND

WAITS_FOR_THE_PAST = f"`choose` answered a Wait until now or before; it must be until later, or until None; {CHECK_IT}"
WAITS_WITH_ADMITTED = f"`choose` admitted requests and answered a Wait; one that is admitted has to run; {CHECK_IT}"
WAKES_IN_THE_PAST = f"`wakes_at_ps` answered a time that is not later than now; it must be, or None; {CHECK_IT}"
HOLDS_FOR_NOTHING = f"`holds_for` answered less than 1; it must be from 1 to its limit; {CHECK_IT}"
LOST = f"the queue has lost requests: they neither run nor wait, or its len() leaves them out; {CHECK_IT}"
CANCELS_ANOTHER = f"`cancel` answered another request than the one it was asked for; {CHECK_IT}"
HAS_ENDED = f"the queue still has requests that have ended; {CHECK_IT}"
WAITS_ON: Final = 10_000
FEWEST_WAITS_ON: Final = 100
MEAN_WAIT_PS: Final = PS_PER_SECOND // WAITS_ON
"""A policy may name the time of the next decision `WAITS_ON` times in a row if the waits are shorter than this on
average, which is about what one decision takes live. Whenever that has ended all requests of its worker, a tenth as
often from then on, down to `FEWEST_WAITS_ON` times."""
ADMITTED_UNKNOWN = f"`admit` admitted a request that does not wait in this queue; {CHECK_IT}"
ADMITTED_BY_HAND = f"`admit` changed `admission.admitted`; requests enter it by `admission.admit` alone; {CHECK_IT}"
DROPPED_UNKNOWN = f"`admit` dropped a request that it does not have; {CHECK_IT}"


_OURS: Final = ("lorrery.scheduler.core.", "lorrery.validation.padded_fifo")


def is_ours(policy: object) -> bool:
    """Return whether a policy is of the tree: its limits are constant, and its results need no checks."""
    return type(policy).__module__.startswith(_OURS)


def dropped_by(queue: Queue, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
    """Call `admit` of a queue from outside the tree; return the sequences that it dropped.

    Raises:
        TypeError: its result is no list.
    """
    policy: Any = queue
    answer = policy.admit(admission, running, at_ps)
    if not isinstance(answer, list):
        raise TypeError(f"`admit` answered {_a(answer)}; it must be a list, [] if no request is dropped; {CHECK_IT}")
    return answer


def steps_held(queue: Queue, running: Running, memory: Memory, limit: int) -> int:
    """Return for how many steps a queue from outside says its result holds.

    Raises:
        TypeError: its result is no whole number.
        ValueError: it is less than 1.
    """
    policy: Any = queue
    answer = policy.holds_for(running, memory, limit)
    if not isinstance(answer, int):
        raise TypeError(f"`holds_for` answered {_a(answer)}; it must be an int from 1 to its limit; {CHECK_IT}")
    if answer < 1:
        raise ValueError(HOLDS_FOR_NOTHING)
    return answer


def wake_of(queue: Queue, at_ps: int) -> int | None:
    """Return when time alone changes what a queue from outside would do; an empty one is not called: never.

    Raises:
        TypeError: its result is no whole number.
        ValueError: it is not a later time.
    """
    policy: Any = queue
    if not len(policy):
        return None
    answer = policy.wakes_at_ps(at_ps)
    if answer is None:
        return None
    if not isinstance(answer, int):
        raise TypeError(f"`wakes_at_ps` answered {_a(answer)}; it must be an int (picoseconds) or None; {CHECK_IT}")
    if answer <= at_ps:
        raise ValueError(WAKES_IN_THE_PAST)
    return answer


def end_of(choice: object, running: Running, queue: Queue, at_ps: int) -> int | None:
    """Return until when a way to batch from outside waits; if nothing runs or waits, until something arrives.

    Raises:
        TypeError: it returned neither a Step nor a Wait.
        ValueError: it waits for a time that is not in the future.
    """
    if not isinstance(choice, Wait):
        raise TypeError(f"`choose` answered {_a(choice)}; it must be a Step or a Wait; {CHECK_IT}")
    if choice.until_ps is None:
        return None
    if choice.until_ps <= at_ps:
        raise ValueError(WAITS_FOR_THE_PAST)
    policy: Any = queue
    return choice.until_ps if running.num or len(policy) else None


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
    """Requests that were given to a queue from outside the tree, as they were then.

    It gets the core's own objects and may only read them: a changed length would surface in the device, as an error
    that names no policy. So each is compared when it is admitted. What had changed in any of them is then put back.
    """

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


class Waits:
    """Consecutive decisions to run nothing until a time that a policy from outside named.

    A policy that names the next picosecond and admits no sequence would keep a simulation, or a scheduler, busy for
    ever. The waits are counted as answered, not as they pass: live and simulated, the same decision is the one too
    many. Each further one is too, until something runs, a sequence leaves the queue, or all have been ended.
    """

    __slots__ = ("_allowed", "_num", "_total_ps")

    def __init__(self) -> None:
        self._allowed = WAITS_ON
        self._num = 0
        self._total_ps = 0

    def end(self) -> None:
        """Forget the decisions so far: something runs, or a sequence has left the queue."""
        self._num = self._total_ps = 0

    def all_ended(self) -> None:
        """Forget the decisions so far, since an error has ended all sequences; allow fewer if this was the error."""
        if self._num >= self._allowed:
            self._allowed = max(FEWEST_WAITS_ON, self._allowed // 10)
        self.end()

    def add(self, wait_ps: int, *, is_of_queue: bool) -> None:
        """Count a decision.

        Args:
            wait_ps: until the time that was named.
            is_of_queue: whether the queue named it; otherwise the way to batch.

        Raises:
            ValueError: it is one too many.
        """
        self._num += 1
        self._total_ps += min(wait_ps, PS_PER_SECOND)
        if self._num < self._allowed:
            return
        mean_ps = self._total_ps // self._num
        if mean_ps >= MEAN_WAIT_PS:
            self.end()
            return
        raise ValueError(_waits_on(self._allowed, mean_ps, is_of_queue=is_of_queue))


def _waits_on(num: int, mean_ps: int, *, is_of_queue: bool) -> str:
    """Name the mean as a power of ten above it, so that there are few such messages."""
    at_most_ps = 1
    while at_most_ps < mean_ps:
        at_most_ps *= 10
    answers = "`wakes_at_ps` answered a time" if is_of_queue else "`choose` answered a Wait"
    cure = (
        "answer the time from which `admit` decides otherwise, or None: it is called when something arrives"
        if is_of_queue
        else "wait until the time from which it chooses a Step, or until None: it is called when something arrives"
    )
    return (
        f"{answers} {num:,} times in a row, on average at most {at_most_ps:,} ps later, and nothing ran and no"
        f" request was admitted or dropped; {cure}; {CHECK_IT}"
    )


def _a(answer: object) -> str:
    """Name a result by its type: messages that have its value would differ each time."""
    return "None" if answer is None else f"a {type(answer).__name__}"


def check_step(step: Step, running: Running) -> None:
    """Check a step that a way to batch has chosen.

    Raises:
        TypeError: a part of it is of another type.
        ValueError: it cannot run.
    """
    _check_types(step)
    if step.max_steps < 1 or step.chunk_steps < 1:
        raise ValueError(f"`choose` answered a Step of less than one step; {CHECK_IT}")
    runs_chunks = any(chunk.new_tokens or chunk.samples for chunk in step.chunks)
    if not runs_chunks and not (step.decode and running.num_decoding):
        raise ValueError(f"`choose` answered a Step in which nothing runs; answer a Wait, or chunks; {CHECK_IT}")
    handles: set[int] = set()
    for chunk in step.chunks:
        sequence = chunk.sequence
        if running.prefilling.get(sequence.handle) is not sequence:
            raise ValueError(f"`choose` answered a chunk of a request that is not in prefill; {CHECK_IT}")
        if sequence.handle in handles:
            raise ValueError(f"`choose` answered two chunks of one request; {CHECK_IT}")
        handles.add(sequence.handle)
        computed = chunk.past_tokens + chunk.new_tokens
        if chunk.past_tokens != sequence.computed_tokens or not 0 <= chunk.new_tokens <= sequence.input_tokens:
            raise ValueError(f"`choose` answered a chunk that does not follow on what is computed; {CHECK_IT}")
        if computed > sequence.input_tokens or chunk.samples != (computed == sequence.input_tokens):
            raise ValueError(
                f"`choose` answered a chunk whose `samples` does not say whether it ends its input; {CHECK_IT}"
            )
    if step.chunk_steps > 1 and (len(step.chunks) != 1 or step.chunks[0].samples):
        raise ValueError(f"`choose` answered chunk_steps without one chunk that leaves some of its prompt; {CHECK_IT}")


def _check_types(step: Any) -> None:  # noqa: ANN401  as somebody's own class has made it
    for name in ("max_steps", "chunk_steps"):
        number = getattr(step, name)
        if not isinstance(number, int):
            raise TypeError(f"`choose` answered a Step whose `{name}` is {_a(number)}; it must be an int; {CHECK_IT}")
    if not isinstance(step.chunks, (list, tuple)):
        raise TypeError(
            f"`choose` answered a Step whose `chunks` are {_a(step.chunks)}; they must be a list; {CHECK_IT}"
        )
    for chunk in step.chunks:
        for name in ("new_tokens", "past_tokens"):
            number = getattr(chunk, name)
            if not isinstance(number, int):
                raise TypeError(
                    f"`choose` answered a Chunk whose `{name}` is {_a(number)}; it must be an int; {CHECK_IT}"
                )
    for adapter in step.prefetch:
        if not isinstance(adapter, Adapter):
            raise TypeError(
                f"`choose` answered a Step that would prefetch {_a(adapter)}; each must be an Adapter, as a sequence's"
                f" `adapter` is; {CHECK_IT}"
            )
