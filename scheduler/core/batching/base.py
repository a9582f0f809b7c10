"""What the next step may be, and what is known to who chooses it."""

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from operator import index
from typing import SupportsIndex

from lorrery.scheduler.core.admission import BatchLimits
from lorrery.scheduler.core.plan import Chunk
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.vocabulary.compiling import mypyc_attr


@mypyc_attr(acyclic=True, free_list_len=1)
@dataclass(slots=True, init=False)
class Step:
    """Something to run.

    Attributes:
        chunks: prompt pieces to compute, in the first step.
        decode: whether every sequence past its prompt gets a token in each step.
        max_steps: how many steps this choice holds without events; 1 with chunks.
        chunk_steps: see `Plan`; how many steps without events go on with the one chunk's prompt.
        prefetch: adapters to load meanwhile.
        hold: sequences that end stay in the batch until all have ended (static batching).
    """

    chunks: Many[Chunk]
    decode: bool
    max_steps: int
    chunk_steps: int
    prefetch: tuple[Adapter, ...]
    hold: bool

    def __init__(
        self,
        chunks: Many[Chunk] = (),
        *,
        decode: bool = False,
        max_steps: int = 1,
        chunk_steps: int = 1,
        prefetch: tuple[Adapter, ...] = (),
        hold: bool = False,
    ) -> None:
        self.chunks = chunks
        self.decode = decode
        self.max_steps = max_steps
        self.chunk_steps = chunk_steps
        self.prefetch = prefetch
        self.hold = hold


@dataclass(slots=True, init=False)
class Wait:
    """Nothing runs.

    Args:
        until_ps: when to ask again, in whole picoseconds; None: when something arrives. Nor is anything asked before,
            where nobody waits and nobody runs.

    Raises:
        TypeError: a time that is no whole number.
    """

    until_ps: int | None

    def __init__(self, until_ps: SupportsIndex | None = None) -> None:
        try:
            self.until_ps = None if until_ps is None else index(until_ps)
        except TypeError:
            raise TypeError(f"Wait({until_ps!r}): until_ps must be whole picoseconds, or None") from None


@mypyc_attr(allow_interpreted_subclasses=True)
class BatchContext:
    """What a way to batch sees of its replica, and what it may do there.

    A base class and no protocol, so that compiled code calls its methods without looking them up: a context of one's
    own (a test's, one that wraps another) derives from it. Not abstract by `abc`: mypyc gives the instances of such a
    class weak references that outlive them.
    """

    running: Running

    def admit(self, limits: BatchLimits, at_ps: int, max_prompt_tokens: int | None = None) -> list[Sequence]:
        """Admit waiting sequences within these limits; they are in prefill afterwards.

        Args:
            limits: of the walk.
            at_ps: the boundary.
            max_prompt_tokens: in place of the limits' own, where a step has used up some of it.
        """
        raise NotImplementedError

    def steps_blocked(self, limit: int) -> int:
        """Return for how many decode steps `admit`, which has just admitted nobody, would go on to do so."""
        raise NotImplementedError

    def has_no_candidates(self) -> bool:
        """Tell whether `admit` would find nobody, and change nothing, until something arrives."""
        raise NotImplementedError

    def arrivals_matter(self) -> bool:
        """Tell whether an arrival could change what `admit` has just answered."""
        raise NotImplementedError

    def look_ahead(self, max_prompt_tokens: int) -> list[Sequence]:
        """Return who would be admitted next if only the prompt limit counted."""
        raise NotImplementedError


def decodes_on(batching: object) -> bool:
    """Tell whether a way to batch says, by a true `decodes_on`, what it does while nobody could enter.

    That is: it has no state, and its limits stay; with a sequence past its prompt, none in prefill and none that waits,
    its choice is to decode until the first one reaches its length. Then it need not be asked, nor told of steps. The
    attribute speaks for the class that defines it: one that defines any other part anew has to say so again.
    """
    for cls in type(batching).__mro__:
        if "decodes_on" in vars(cls):
            return bool(vars(cls)["decodes_on"])
        if not _PARTS.isdisjoint(vars(cls)):
            break
    return False


_PARTS = frozenset({"limits", "choose", "advanced", "emptied"})
"""Of a way to batch: what `decodes_on` speaks of."""


def whole(sequences: Iterable[Sequence]) -> list[Chunk]:
    """Return what is left of these sequences' inputs, each in one piece."""
    return [
        Chunk(sequence, sequence.input_tokens - sequence.computed_tokens, sequence.computed_tokens, samples=True)
        for sequence in sequences
    ]
