"""State that a replica keeps of sequences that have ended.

Under static batching they keep their place until all have ended. A few end with a step that gave them no token.
"""

from collections.abc import Iterable

from lorrery.scheduler.core.facts import Finished, ended
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.finish_reason import FinishReason


class FinishedSequences:
    """See the module."""

    def __init__(self) -> None:
        self._held: dict[int, FinishReason] = {}
        self._silent: set[int] = set()

    def were_silent(self, handles: Iterable[int]) -> None:
        """Note the sequences whose last step gave no token."""
        self._silent.update(handles)

    def hold(self, running: Running, sequence: Sequence, reason: FinishReason) -> None:
        """Let a sequence that has ended keep its place in the batch."""
        running.hold(sequence)
        self._held[sequence.handle] = reason

    def take(self, handle: int) -> FinishReason | None:
        """Return, once, the finish reason of a held sequence; None: it was not held."""
        return self._held.pop(handle, None)

    def forget(self, handle: int) -> None:
        """Forget a sequence that was cancelled."""
        self._held.pop(handle, None)
        self._silent.discard(handle)

    def take_all(self, running: Running) -> dict[int, FinishReason]:
        """Return, once, all held sequences with their finish reasons, if no other is left."""
        if len(self._held) < running.num:
            return {}
        held, self._held = self._held, {}
        return held

    def finished(self, sequence: Sequence, reason: FinishReason, output_tokens: int, at_ps: int) -> Finished:
        """Make the event of a finish after `output_tokens` in this batch; a silent last step counts, but gave none."""
        output_tokens += sequence.produced_tokens
        if sequence.handle in self._silent:
            self._silent.discard(sequence.handle)
            output_tokens -= 1
        return ended(sequence, reason, output_tokens, at_ps)
