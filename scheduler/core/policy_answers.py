"""What policies from outside the tree may answer, checked where the core reads it.

An answer that makes no sense would come to light far from the policy, in a device that knows nothing of it, or not at
all: a queue that wakes at the present is asked for ever. So it is an error of the policy's, as if it had raised. The
messages name no request, so that each is logged once. What is checked for every answer costs a comparison; what takes
a loop is left out for our own policies, whose tests do it.
"""

from lorrery.scheduler.core.admission import CHECK_IT
from lorrery.scheduler.core.batching.base import Step
from lorrery.scheduler.core.running import Running

WAITS_FOR_THE_PAST = f"`choose` answered a Wait until now or before; it must be until later, or until None; {CHECK_IT}"
WAITS_WITH_ADMITTED = f"`choose` admitted requests and answered a Wait; one that is admitted has to run; {CHECK_IT}"
WAKES_IN_THE_PAST = f"`wakes_at_ps` answered a time that is not later than now; it must be, or None; {CHECK_IT}"
HOLDS_FOR_NOTHING = f"`holds_for` answered less than 1; it must be from 1 to its limit; {CHECK_IT}"
LOST = f"the queue has lost requests: they neither wait nor run; {CHECK_IT}"
CANCELS_ANOTHER = f"`cancel` answered another request than the one it was asked for; {CHECK_IT}"
HAS_ENDED = f"the queue still has requests that have ended; {CHECK_IT}"
DROPPED_UNKNOWN = f"`admit` dropped a request that it does not have; {CHECK_IT}"


def is_ours(policy: object) -> bool:
    """Tell whether a policy is of the tree: its limits stay, and its answers need no loop over them."""
    return type(policy).__module__.startswith("lorrery.scheduler.core.")


def check_step(step: Step, running: Running) -> None:
    """Check a step that a way to batch has chosen.

    Raises:
        ValueError: it cannot run.
    """
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
