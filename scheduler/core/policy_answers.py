"""What policies from outside the tree may answer, checked where the core reads it.

An answer that makes no sense would come to light far from the policy, in a device that knows nothing of it, or not at
all: a queue that wakes at the present is asked for ever. So it is an error of the policy's, as if it had raised. The
messages name no request, so that each is logged once. Our own policies are not checked: their tests do it, and types.

The compiled core converts whatever a typed call returns, and would refuse a wrong type in words of its own. So a policy
from outside is called as `Any`, and is told the same whether the core is compiled or not.
"""

from typing import Any

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


def is_ours(policy: object) -> bool:
    """Tell whether a policy is of the tree: its limits stay, and its answers need no loop over them."""
    return type(policy).__module__.startswith("lorrery.scheduler.core.")


def dropped_by(queue: Queue, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
    """Let a queue from outside admit; return whom it dropped.

    Raises:
        TypeError: its answer is no list.
    """
    policy: Any = queue
    answer = policy.admit(admission, running, at_ps)
    if not isinstance(answer, list):
        raise TypeError(f"`admit` answered {_a(answer)}; it must be a list, [] where nobody is dropped; {CHECK_IT}")
    return answer


def steps_held(queue: Queue, running: Running, memory: Memory, limit: int) -> int:
    """Ask a queue from outside for how many steps its answer holds.

    Raises:
        TypeError: its answer is no whole number.
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
    """Ask a queue from outside when time alone changes its answer: never where nobody waits, so it is not asked then.

    Raises:
        TypeError: its answer is no whole number.
        ValueError: it is no later time.
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
    """Return until when a way to batch from outside waits; where nobody runs or waits, until somebody comes.

    Raises:
        TypeError: it answered neither a Step nor a Wait.
        ValueError: it waits for the past.
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
    """Name an answer by its type: messages that have its value would differ each time."""
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
    if not step.chunks and not (step.decode and running.num_decoding):
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
