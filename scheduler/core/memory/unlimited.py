"""No memory rule: whatever the count limit admits fits (llm-mock, which models no memory)."""

from lorrery.scheduler.core.memory.base import BlockUse, Check, Memory, Trial
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.compiling import mypyc_attr
from lorrery.vocabulary.units import NEVER


@mypyc_attr(allow_interpreted_subclasses=True)
class UnlimitedMemory(Memory):
    """A pool without limit."""

    reserved = True

    def trial(self, running: Running) -> "_UnlimitedTrial":
        """Begin an admission pass."""
        return _UnlimitedTrial(running)

    def steps_until_fits(self, running: Running, sequence: Sequence, limit: int) -> int:
        """Return 1: memory refuses nothing."""
        return 1

    @property
    def capacity(self) -> tuple[int, ...]:
        """Empty: every sequence fits."""
        return ()

    def can_ever_hold(self, sequence: Sequence) -> str | None:
        """Return None: every sequence fits."""
        return None

    def admitted(self, sequence: Sequence) -> None:
        """Reserve nothing."""

    def joined(self, sequence: Sequence) -> None:
        """Nothing depends on growth."""

    def left(self, sequence: Sequence) -> None:
        """Free nothing."""

    def steps_before_full(self, running: Running, limit: int) -> int:
        """Return `limit`."""
        return limit

    def victim(self, running: Running) -> Sequence | None:
        """Return None: nothing is preempted."""
        return None

    def spare_tokens(self, running: Running, num_steps: int) -> int:
        """Return more than any cache holds."""
        return NEVER

    def block_use(self, running: Running) -> BlockUse | None:
        """Return None: there are no blocks."""
        return None


class _UnlimitedTrial(Trial):
    """One pass; it counts sequences and tokens for readers of the checks."""

    def __init__(self, running: Running) -> None:
        self._num_sequences = len(running)
        self._tokens = running.reserved_tokens
        self._adapter_slots = running.adapter_slots

    def test(self, sequence: Sequence) -> Check:
        """Pass every sequence."""
        tokens = self._tokens + _most_tokens(sequence)
        return Check(sequence, tokens, self._adapter_slots, self._num_sequences + 1, fits=True)

    def take(self, sequence: Sequence) -> None:
        """Count a sequence as taken."""
        self._num_sequences += 1
        self._tokens += _most_tokens(sequence)


def _most_tokens(sequence: Sequence) -> int:
    return sequence.input_tokens + sequence.budget_tokens - 1
