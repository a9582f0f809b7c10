"""Checks of what policies from outside the tree return, made where the core reads it.

A senseless result would surface far from the policy, in a device that knows nothing of it, or not at all: a queue that
wakes at the present time would be called for ever. So it is an error of the policy, as if it had raised. The messages
name no request, so that each is logged once. The tree's own policies are not checked: tests and types do it.
`core.given` checks what a queue does to the requests that it was given, and `core.waits` how often a policy waits in
vain.

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

WAITS_FOR_THE_PAST = f"`choose` answered a Wait until now or before; it must be until later, or until None; {CHECK_IT}"
WAITS_WITH_ADMITTED = f"`choose` admitted requests and answered a Wait; one that is admitted has to run; {CHECK_IT}"
WAKES_IN_THE_PAST = f"`wakes_at_ps` answered a time that is not later than now; it must be, or None; {CHECK_IT}"
HOLDS_FOR_NOTHING = f"`holds_for` answered less than 1; it must be from 1 to its limit; {CHECK_IT}"
LOST = f"the queue has lost requests: they neither run nor wait, or its len() leaves them out; {CHECK_IT}"
CANCELS_ANOTHER = f"`cancel` answered another request than the one it was asked for; {CHECK_IT}"
HAS_ENDED = f"the queue still has requests that have ended; {CHECK_IT}"
DROPPED_UNKNOWN = f"`admit` dropped a request that it does not have; {CHECK_IT}"


_OURS: Final = (
    "lorrery.scheduler.core.",
    "lorrery.validation.padded_fifo",
    "lorrery.validation.golden.sglang_scheduler",
)


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
