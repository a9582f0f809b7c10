"""The interface of a memory rule.

These are base classes and not protocols, so that compiled code calls their methods without a lookup. Not abstract by
`abc`: mypyc gives the instances of such a class weak references that outlive them.
"""

from dataclasses import dataclass

from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.compiling import mypyc_attr
from lorrery.vocabulary.units import NEVER


@mypyc_attr(acyclic=True, free_list_len=1)
@dataclass(slots=True, init=False)
class Check:
    """One test of an admission pass; every figure includes the candidate.

    Attributes:
        peak_tokens: tokens in the pool at the peak, or more if the memory rule does not report it exactly.
        adapter_slots: pool slots that the distinct adapters take.
        num_sequences: sequences counted: running ones, and those taken in this pass.
        fits: whether memory suffices.
    """

    sequence: Sequence
    peak_tokens: int
    adapter_slots: int
    num_sequences: int
    fits: bool

    def __init__(
        self, sequence: Sequence, peak_tokens: int, adapter_slots: int, num_sequences: int, fits: bool
    ) -> None:
        self.sequence = sequence
        self.peak_tokens = peak_tokens
        self.adapter_slots = adapter_slots
        self.num_sequences = num_sequences
        self.fits = fits


@dataclass(frozen=True, slots=True)
class BlockUse:
    """How the blocks of a paged pool are used; `used + cached + free` is all of them.

    Attributes:
        used: by sequences and adapters; a block that several share counts once.
        cached: kept by a prefix cache, and available on demand.
        free: unused. Negative if the coming decode step needs more than there are: then a sequence must be preempted.
        block_size: tokens in a block.
    """

    used: int
    cached: int
    free: int
    block_size: int


class Trial:
    """Memory as one admission pass sees it: current use, and what the pass has taken so far."""

    def test(self, sequence: Sequence) -> Check:
        """Test one more sequence."""
        raise NotImplementedError

    def take(self, sequence: Sequence) -> None:
        """Count a sequence that passed as taken."""
        raise NotImplementedError


@mypyc_attr(allow_interpreted_subclasses=True)
class Memory:
    """A replica's KV pool.

    Attributes:
        reserved: whether an admitted sequence has reserved all it will ever need: then nothing is preempted, and
            `victim` is not called.
    """

    reserved = False

    def trial(self, running: Running) -> Trial:
        """Begin an admission pass. The pool does not change before `admitted`."""
        raise NotImplementedError

    def steps_until_fits(self, running: Running, sequence: Sequence, limit: int) -> int:
        """Return after how many decode steps a waiting sequence that does not fit now will: 1 to `limit`.

        `limit` is small enough that no running sequence ends within it, and nothing prefills. 1 if it is unknown.
        """
        raise NotImplementedError

    @property
    def capacity(self) -> tuple[int, ...]:
        """Key that decides `can_ever_hold`: memories of one class with equal keys hold the same sequences."""
        raise NotImplementedError

    def can_ever_hold(self, sequence: Sequence) -> str | None:
        """Return None if an empty pool holds the sequence to its end, else why not: what, the limit, what to do."""
        raise NotImplementedError

    def admitted(self, sequence: Sequence) -> None:
        """Allocate what a sequence needs for its prefill."""
        raise NotImplementedError

    def joined(self, sequence: Sequence) -> None:
        """Note that a sequence has its first token and will grow by one in every decode step."""
        raise NotImplementedError

    def left(self, sequence: Sequence) -> None:
        """Free what a sequence had."""
        raise NotImplementedError

    def steps_before_full(self, running: Running, limit: int) -> int:
        """Return for how many decode steps the running sequences surely have memory, at most `limit`."""
        raise NotImplementedError

    def victim(self, running: Running) -> Sequence | None:
        """Return the sequence to preempt next so that the coming decode step has room; usually None."""
        raise NotImplementedError

    def spare_tokens(self, running: Running, num_steps: int) -> int:
        """Return the tokens left free after a decode step that follows `num_steps` others; a prefix cache may use them.

        Blocks in use by a sequence count as its own, even if a prefix cache knows them.
        """
        raise NotImplementedError

    def block_use(self, running: Running) -> BlockUse | None:
        """Return the use of blocks; None if the pool has none."""
        raise NotImplementedError


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
