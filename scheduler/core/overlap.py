"""Results that become known one decision late: the overlap loop of SGLang, in which planning hides behind the GPU.

While a step runs, the next one is chosen without its result (sgl-project/sglang 0.5.23, srt/managers/scheduler.py,
`event_loop_overlap`). So a decision knows what the last step *launched*: tokens that it took memory for, prompts that
it has finished. It does not know what came out, and for sequences of that step:

* output counts as one token shorter than it is (`Unseen`);
* a prompt's KV is not in the prefix cache yet;
* one that ended by a stop is taken for running: it may decode once more, for nothing, and may even be preempted;
* one that ended by its length is known to do so, and does not decode.

`commit` notes a step's result, and `settle`, after the next decision, applies it: what has ended leaves, prompts enter
the cache. Its events carry the time at which they happened; drivers call `plan` at that very boundary, so clients see
them in time. A preempted sequence has lost its last token, which nobody has seen in the original; it makes it anew.

All else of the core is as without it; only the way to batch `sglang` heeds `Unseen`.
"""

from collections.abc import Container
from typing import Final

from lorrery.scheduler.core.batch import Batch
from lorrery.scheduler.core.facts import Event
from lorrery.scheduler.core.plan import Plan, Ran
from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.endings import FinishReason


class Unseen:
    """Tokens that sequences have produced, but of which the coming decision does not know.

    Attributes:
        decoded: whether every decoding sequence has one.
        sampled: handles of those that have one otherwise: of prompts that the last step finished.
        ended: reason by handle of those that have ended with it.
    """

    __slots__ = ("decoded", "ended", "sampled")

    def __init__(self, *, decoded: bool, sampled: Container[int], ended: dict[int, FinishReason]) -> None:
        self.decoded = decoded
        self.sampled = sampled
        self.ended = ended

    def of(self, sequence: Sequence) -> int:
        """Return a running sequence's unseen tokens: 0 or 1."""
        return 1 if self.decoded or sequence.handle in self.sampled else 0


NOTHING: Final = Unseen(decoded=False, sampled=(), ended={})


class Overlap:
    """The result of the last step of a batch.

    Args:
        batch: to which it is applied.

    Attributes:
        unseen: what the coming decision does not know of it.
    """

    def __init__(self, batch: Batch) -> None:
        self.unseen = NOTHING
        self._batch = batch
        self._plan: Plan | None = None
        self._ended_ps = 0

    @property
    def is_settled(self) -> bool:
        """Whether the last step's result is known."""
        return self._plan is None

    def commit(self, plan: Plan, ran: Ran, ended: dict[int, FinishReason]) -> None:
        """Apply what a step launched, and note its result. Decode steps have been counted."""
        running, memory = self._batch.running, self._batch.memory
        sampled: set[int] = set()
        for chunk in plan.prefills:
            chunk.sequence.computed_tokens += chunk.new_tokens
            if chunk.samples:
                running.join(chunk.sequence)
                memory.joined(chunk.sequence)
                sampled.add(chunk.handle)
        self.unseen = Unseen(decoded=plan.decode, sampled=sampled, ended=ended)
        self._plan, self._ended_ps = plan, ran.end_ps

    def take_back(self, sequence: Sequence) -> tuple[int, bool]:
        """Forget what is unseen of a sequence that is preempted: return its tokens, and whether it had ended."""
        unseen = self.unseen.of(sequence)
        had_ended = self.unseen.ended.pop(sequence.handle, None) is not None
        return unseen, had_ended

    def settle(self, next_plan: object) -> list[Event]:
        """Apply the result of the last step; call it after the decision that follows, and pass that."""
        plan, events = self._plan, list[Event]()
        if plan is None:
            return events
        batch, ended, at_ps = self._batch, self.unseen.ended, self._ended_ps
        running = batch.running
        computed_beyond = int(isinstance(next_plan, Plan) and next_plan.decode)
        for chunk in plan.prefills:
            sequence = chunk.sequence
            if not chunk.samples or running.get(sequence.handle) is not sequence or running.is_prefilling(sequence):
                continue  # cancelled or preempted since
            batch.note_first_token(sequence, at_ps, events)
            if sequence.handle not in ended and batch.prefix_cache is not None:
                batch.prefix_cache.commit(sequence)
            elif sequence.handle in ended:
                self._finish(sequence, ended.pop(sequence.handle), computed_beyond, events)
        for handle, reason in ended.items():
            found = running.get(handle)
            if found is not None:
                self._finish(found, reason, computed_beyond, events)
        self.unseen, self._plan = NOTHING, None
        return events

    def _finish(self, sequence: Sequence, reason: FinishReason, computed_beyond: int, events: list[Event]) -> None:
        held = sequence.handle in self._batch.running.held  # it ended by its length, and did not decode again
        beyond = 0 if held else computed_beyond
        self._batch.finish(sequence.handle, reason, self._ended_ps, events, ahead=beyond)
