"""A way to batch from outside the tree, checked at each call."""

from typing import Any, Final

from lorrery.scheduler.core.admission import CHECK_IT, BatchLimits
from lorrery.scheduler.core.batching.base import BatchContext, Step, Wait
from lorrery.scheduler.core.checked.base import Checked, Waits, a
from lorrery.scheduler.core.protocols import Batching
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Adapter

WAITS_FOR_THE_PAST: Final = (
    f"`choose` answered a Wait until now or before; it must be until later, or until None; {CHECK_IT}"
)
WAITS_WITH_ADMITTED: Final = (
    f"`choose` admitted requests and answered a Wait; one that is admitted has to run; {CHECK_IT}"
)
WAITS: Final = "`choose` answered a Wait"
CURE: Final = "wait until the time from which it chooses a Step, or until None: it is called when something arrives"


class CheckedBatching(Checked):
    """A way to batch that calls one from outside the tree.

    The plug-in is called as `Any`: the compiled core converts what a typed call returns, and would refuse a wrong type
    with a message of its own.
    """

    def __init__(self, batching: Batching) -> None:
        super().__init__(batching)
        self._batching: Any = batching
        self._waits = Waits(WAITS, CURE)
        self._num_waiting = 0

    @property
    def limits(self) -> BatchLimits:
        """Limits of the plug-in, which may change; to read them may raise."""
        limits: BatchLimits = self._batching.limits
        return limits

    def choose(self, context: BatchContext, at_ps: int) -> Step | Wait:
        """Choose the next step. If nothing runs and nothing waits, a Wait is until something arrives.

        Raises:
            TypeError: the result is neither a Step nor a Wait, or a part of it is of another type.
            ValueError: the Step cannot run, or the Wait is not until later or one of too many.
        """
        choice = self._batching.choose(context, at_ps)
        running = context.running
        if isinstance(choice, Step):
            _check_step(choice, running)
            self._waits.end()
            return choice
        if not isinstance(choice, Wait):
            raise TypeError(f"`choose` answered {a(choice)}; it must be a Step or a Wait; {CHECK_IT}")
        if choice.until_ps is not None and choice.until_ps <= at_ps:
            raise ValueError(WAITS_FOR_THE_PAST)
        if context.admitted:
            raise ValueError(WAITS_WITH_ADMITTED)
        num_waiting = context.num_waiting
        if choice.until_ps is None or not (running.num or num_waiting):
            self._waits.all_ended()
            return Wait()
        if num_waiting < self._num_waiting and not self._waits.are_too_many:
            self._waits.end()
        self._num_waiting = num_waiting
        self._waits.add(choice.until_ps - at_ps)
        return choice

    def advanced(self, num_decode_steps: int) -> None:
        """Note that this many decode steps of the last choice are done."""
        self._batching.advanced(num_decode_steps)

    def emptied(self, at_ps: int) -> None:
        """Note that the batch became empty at this boundary."""
        self._batching.emptied(at_ps)

    def arrivals_matter(self, context: BatchContext) -> bool:
        """Return whether an arrival may change the last choice before it has run out."""
        matters: bool = self._batching.arrivals_matter(context)
        return matters


def _check_step(step: Step, running: Running) -> None:
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
            raise TypeError(f"`choose` answered a Step whose `{name}` is {a(number)}; it must be an int; {CHECK_IT}")
    if not isinstance(step.chunks, (list, tuple)):
        raise TypeError(
            f"`choose` answered a Step whose `chunks` are {a(step.chunks)}; they must be a list; {CHECK_IT}"
        )
    for chunk in step.chunks:
        for name in ("new_tokens", "past_tokens"):
            number = getattr(chunk, name)
            if not isinstance(number, int):
                raise TypeError(
                    f"`choose` answered a Chunk whose `{name}` is {a(number)}; it must be an int; {CHECK_IT}"
                )
    for adapter in step.prefetch:
        if not isinstance(adapter, Adapter):
            raise TypeError(
                f"`choose` answered a Step that would prefetch {a(adapter)}; each must be an Adapter, as a sequence's"
                f" `adapter` is; {CHECK_IT}"
            )
