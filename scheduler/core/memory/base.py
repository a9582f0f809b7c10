"""What a memory rule must be able to do.

These are base classes and no protocols, so that compiled code calls their methods without looking them up. Not abstract
by `abc`: mypyc gives the instances of such a class weak references that outlive them.
"""

from dataclasses import dataclass

from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.compiling import mypyc_attr


@mypyc_attr(acyclic=True, free_list_len=1)
@dataclass(slots=True, init=False)
class Check:
    """One test of an admission pass; every figure includes the candidate.

    Attributes:
        peak_tokens: what the pool would hold at its worst, or more where the memory rule does not report it exactly.
        adapter_slots: what the distinct adapters take from it.
        num_sequences: sequences counted, those running and those taken in this walk.
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
    """Who has the blocks of a paged pool; `used + cached + free` is all of them.

    Attributes:
        used: by sequences and adapters; one that several share counts once.
        cached: kept by a prefix cache, and free for whoever needs them.
        free: by nobody. Negative where the coming decode step needs more than there are: somebody must go.
    """

    used: int
    cached: int
    free: int


class Trial:
    """Memory as one admission pass sees it: what is in use, and what the pass has taken so far."""

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
        reserved: whether whoever is admitted has all it will ever need: then nobody is preempted, and no victim asked
            for.
    """

    reserved = False

    def trial(self, running: Running) -> Trial:
        """Begin an admission walk. The pool does not change before `admitted`."""
        raise NotImplementedError

    def steps_until_fits(self, running: Running, sequence: Sequence, limit: int) -> int:
        """Return after how many decode steps a waiting sequence that does not fit now will: 1 to `limit`.

        `limit` is so small that no running sequence ends within it, and nothing prefills. 1 where it cannot be told.
        """
        raise NotImplementedError

    @property
    def capacity(self) -> tuple[int, ...]:
        """What `can_ever_hold` depends on: memories of one class with equal ones hold the same sequences."""
        raise NotImplementedError

    def can_ever_hold(self, sequence: Sequence) -> str | None:
        """Return None if an empty pool holds the sequence to its end, else why not: what, the limit, what to do."""
        raise NotImplementedError

    def admitted(self, sequence: Sequence) -> None:
        """Give a sequence what it needs for its prefill."""
        raise NotImplementedError

    def joined(self, sequence: Sequence) -> None:
        """Take note that a sequence has its first token and will grow by one in every decode step."""
        raise NotImplementedError

    def left(self, sequence: Sequence) -> None:
        """Take back what a sequence had."""
        raise NotImplementedError

    def steps_before_full(self, running: Running, limit: int) -> int:
        """Return how many decode steps the running sequences can surely go on, at most `limit`."""
        raise NotImplementedError

    def victim(self, running: Running) -> Sequence | None:
        """Return who must be preempted next so that the coming decode step has room; usually nobody."""
        raise NotImplementedError

    def spare_tokens(self, running: Running, num_steps: int) -> int:
        """Return the tokens that a decode step leaves which `num_steps` others precede; a prefix cache may keep them.

        Blocks that a sequence uses are the sequence's, also where a prefix cache knows them.
        """
        raise NotImplementedError

    def block_use(self, running: Running) -> BlockUse | None:
        """Return who has the blocks; None where the pool has none."""
        raise NotImplementedError
