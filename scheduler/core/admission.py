"""One pass over waiting sequences: which of them enter the batch now.

A queue gives the order in which to try them; the pass tests each one under three limits:

* memory, by the replica's memory rule;
* count: sequences in the batch;
* prompt: tokens that the new batch may compute;

and its adapter must be on the GPU, or loading if the prefill step waits for the load. A queue may let others overtake
a sequence that lacks only its adapter (`pass_over`), within a bound: after that many, nothing enters before it does.
There is no bound while a fault concerns the adapter's load (`Residency.aside`).
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum, auto

from lorrery.scheduler.core.adapters.residency import Residency
from lorrery.scheduler.core.memory.base import Check, Trial
from lorrery.scheduler.core.memory.on_demand import OnDemandMemory
from lorrery.scheduler.core.plan import Chunk
from lorrery.scheduler.core.prefix_cache.base import PrefixCache, usable_tokens
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.compiling import mypyc_attr
from lorrery.vocabulary.units import NEVER

CHECK_IT = "check it: `lorrery validate policy`"
"""Ends the messages about a policy's wrong results."""

STILL_DROPPED = f"`admit` left a request in the queue that it dropped; {CHECK_IT}"
BOTH_ANSWERS = f"`admit` dropped a request that it admitted; {CHECK_IT}"
STILL_WAITS = f"`admit` left a request in the queue that it admitted; {CHECK_IT}"
"""One text for every request, so that it is logged once."""


class Blocked(Enum):
    """The limit that refused a sequence."""

    MEMORY = auto()
    ADAPTER = auto()
    COUNT = auto()
    PROMPT = auto()


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What one batch may hold.

    Attributes:
        max_sequences: sequences in the batch.
        max_prompt_tokens: prompt tokens that one admission pass may take.
        cached_count: whether tokens that a prefix cache holds count against `max_prompt_tokens`.
        partial: whether the last sequence may exceed what is left of `max_prompt_tokens` (chunked prefill).
        max_active: of `max_sequences`, those beside which another one may enter; None: all.
    """

    max_sequences: int
    max_prompt_tokens: int
    cached_count: bool = True
    partial: bool = False
    max_active: int | None = None


@mypyc_attr(acyclic=True)
class AdmissionPass:
    """One admission pass.

    Args:
        trial: memory test.
        limits: on count and prompt tokens.
        cached_tokens: how many leading tokens of a sequence need no computation.
        has_adapter: requires a sequence's adapter, given the sequences admitted so far; called last, for sequences that
            pass otherwise. None: adapters are not used.
        on_take: called with each admitted sequence, before the next one is tested.
        on_check: called with every memory test, in order; for validation and study.
        max_prompt_tokens: replaces that of `limits`.
        max_overtakes: how many sequences may overtake one that waits for its adapter, and how many may be overtaken.
            None: no bound.
        at_ps: now; `admitted_ps` of admitted sequences.
        aside: keys of adapters whose sequences any number may overtake.

    Attributes:
        on_take: as above.
        admitted: sequences that have passed, in order.
        refused: the last sequence that did not pass, and the limit it met.
        passed_over: sequences that lacked only their adapter, each with the number admitted before it. As memory fills,
            the next pass may refuse one for good.
    """

    def __init__(
        self,
        trial: Trial | None,
        limits: BatchLimits,
        cached_tokens: Callable[[Sequence], int],
        has_adapter: Callable[[Sequence, list[Sequence]], bool] | None = None,
        on_check: Callable[[Check], None] | None = None,
        on_take: Callable[[Sequence], None] | None = None,
        max_prompt_tokens: int | None = None,
        max_overtakes: int | None = 0,
        at_ps: int = 0,
        aside: Collection[str] = (),
    ) -> None:
        self.admitted: list[Sequence] = []
        self.refused: tuple[Sequence, Blocked] | None = None
        self._trial = trial
        self._limits = limits
        self._cached_tokens = cached_tokens
        self._has_adapter = has_adapter
        self._on_check = on_check
        self.on_take = on_take
        self._at_ps = at_ps
        self._aside = aside
        self._max_overtakes = NEVER if max_overtakes is None else max_overtakes
        self._overtakes_left = self._max_overtakes
        self.passed_over: list[tuple[Sequence, int]] = []
        self._prompt_tokens_left = limits.max_prompt_tokens if max_prompt_tokens is None else max_prompt_tokens

    def admit(self, sequence: Sequence) -> bool:
        """Test a sequence, and admit it if it passes; return whether it did.

        Raises:
            ValueError: it was admitted or dropped before, and its queue still tries it.
        """
        if self.passed_over and not self._overtakes_left:
            self.refused = (sequence, Blocked.ADAPTER)
            return False
        limits = self._limits
        assert self._trial is not None
        check = self._trial.test(sequence)
        few_enough = check.num_sequences <= limits.max_sequences
        if self._on_check is not None:
            self._on_check(
                Check(sequence, check.peak_tokens, check.adapter_slots, check.num_sequences, check.fits and few_enough)
            )
        prompt_tokens = sequence.input_tokens
        if few_enough and check.fits and not limits.cached_count:
            prompt_tokens -= self._cached_tokens(sequence)
        if not few_enough:
            blocked = Blocked.COUNT
        elif not check.fits:
            blocked = Blocked.MEMORY
        elif (1 if limits.partial else prompt_tokens) > self._prompt_tokens_left:
            blocked = Blocked.PROMPT
        elif (
            sequence.adapter is not None
            and self._has_adapter is not None
            and not self._has_adapter(sequence, self.admitted)
        ):
            blocked = Blocked.ADAPTER
        elif sequence.admitted_ps is not None:
            raise ValueError(STILL_WAITS)
        elif sequence.dropped:
            raise ValueError(STILL_DROPPED)
        else:
            sequence.admitted_ps = self._at_ps
            self._trial.take(sequence)
            self._prompt_tokens_left -= prompt_tokens
            self.admitted.append(sequence)
            if self.passed_over:
                self._overtakes_left -= 1
            if self.on_take is not None:
                self.on_take(sequence)
            return True
        self.refused = (sequence, blocked)
        return False

    def pass_over(self) -> bool:
        """Let others overtake the sequence refused last, if it lacks only its adapter; return whether any may."""
        if self.refused is None or self.refused[1] is not Blocked.ADAPTER:
            return False
        sequence = self.refused[0]
        if sequence.adapter is not None and sequence.adapter.key in self._aside:
            return True
        self._overtakes_left = min(self._overtakes_left, self._max_overtakes - sequence.num_overtaken)
        if self._overtakes_left <= 0 or len(self.passed_over) >= self._max_overtakes:
            return False
        self.passed_over.append((sequence, len(self.admitted)))
        return True

    def note_overtakes(self) -> None:
        """At the end of the pass, count for each sequence passed over how many have overtaken it."""
        for sequence, num_before in self.passed_over:
            sequence.num_overtaken += len(self.admitted) - num_before


class StepPass(AdmissionPass):
    """An admission pass of vLLM's step: it takes the blocks of each chunk at once (`memory.on_demand`).

    A waiting sequence needs, tested in this order:

    * tokens left of the step, and a seat;
    * a place for its adapter among the `max_loras` that a step may use: if there is none, others overtake it, without
      bound, and memory is not tested;
    * with whole prompts, all its tokens within what is left;
    * memory.

    Args:
        running: the batch.
        memory: its pool.
        cache: its prefix cache; None: none.
        limits: seats; whether prompts may be cut (`partial`).
        budget: tokens left of the step.
        most: most tokens of one prompt.
        max_loras: distinct adapters of a step; None: any number.
        has_adapter, on_take, max_overtakes, at_ps, aside: as in `AdmissionPass`.
        min_computed_tokens: see `ReplicaOptions`.

    Attributes:
        chunks: of the admitted sequences.
    """

    def __init__(
        self,
        running: Running,
        memory: OnDemandMemory,
        cache: PrefixCache | None,
        limits: BatchLimits,
        budget: int,
        most: int,
        max_loras: int | None,
        has_adapter: Callable[[Sequence, list[Sequence]], bool] | None,
        on_take: Callable[[Sequence], None] | None,
        max_overtakes: int | None,
        at_ps: int,
        min_computed_tokens: int,
        aside: Collection[str],
    ) -> None:
        super().__init__(None, limits, _none_cached, has_adapter, None, on_take, budget, max_overtakes, at_ps, aside)
        self.chunks: list[Chunk] = []
        self._running = running
        self._memory = memory
        self._cache = cache
        self._most = most
        self._max_loras = max_loras
        self._new_adapters: set[str] = set()
        self._adapter_slots = running.adapter_slots
        self._min_computed_tokens = min_computed_tokens
        self._seats = limits.max_sequences if limits.max_active is None else limits.max_active

    def admit(self, sequence: Sequence) -> bool:
        """Test a sequence, and admit it if it passes; return whether it did.

        Raises:
            ValueError: it was admitted or dropped before, and its queue still tries it.
        """
        running, budget, num_new = self._running, self._prompt_tokens_left, len(self.admitted)
        blocked: Blocked | None = None
        cached_tokens = new_tokens = end = 0
        if budget <= 0:
            blocked = Blocked.PROMPT
        elif self.passed_over and not self._overtakes_left:
            blocked = Blocked.ADAPTER
        elif running.num + num_new >= self._seats:
            blocked = Blocked.COUNT
        elif sequence.adapter is not None and self._has_adapter is not None and not self._may_use(sequence):
            blocked = Blocked.ADAPTER
        else:
            cached_tokens = usable_tokens(self._cache, sequence, self._min_computed_tokens)
            new_tokens = min(sequence.input_tokens - cached_tokens, self._most)
            if new_tokens > budget:
                if not self._limits.partial:
                    blocked = Blocked.PROMPT
                new_tokens = budget
            end = cached_tokens + new_tokens
            beside = running.num + num_new > 0
            slots = self._slots_with(sequence)
            if blocked is None and not self._memory.can_enter(running, sequence, cached_tokens, end, slots, beside):
                blocked = Blocked.MEMORY
        if blocked is not None:
            self.refused = (sequence, blocked)
            return False
        if sequence.admitted_ps is not None:
            raise ValueError(STILL_WAITS)
        if sequence.dropped:
            raise ValueError(STILL_DROPPED)
        if sequence.adapter is not None and self._has_adapter is not None:
            if not self._has_adapter(sequence, self.admitted):
                self.refused = (sequence, Blocked.ADAPTER)
                return False
            self._adapter_slots = self._slots_with(sequence)
            self._new_adapters.add(sequence.adapter.key)
        self._take(sequence, end, new_tokens)
        return True

    def _slots_with(self, sequence: Sequence) -> int:
        """Return the pool slots of adapters as they would be if a sequence entered."""
        adapter = sequence.adapter
        if adapter is None or adapter.key in self._new_adapters or self._running.uses(adapter.key):
            return self._adapter_slots
        return self._adapter_slots + adapter.slots

    def _may_use(self, sequence: Sequence) -> bool:
        """Return whether the step may use a sequence's adapter beside those that it uses already."""
        assert sequence.adapter is not None
        key, most, new = sequence.adapter.key, self._max_loras, self._new_adapters
        if most is None or key in new or self._running.uses(key):
            return True
        num = len(self._running.adapter_keys)
        return num + sum([not self._running.uses(other) for other in new]) < most

    def _take(self, sequence: Sequence, end: int, new_tokens: int) -> None:
        sequence.admitted_ps = self._at_ps
        self.admitted.append(sequence)
        if self.passed_over:
            self._overtakes_left -= 1
        self._prompt_tokens_left -= new_tokens
        memory, cache = self._memory, self._cache
        if self.on_take is not None:
            self.on_take(sequence)
        memory.cover(self._running, sequence, end)
        if cache is not None:
            memory.evict(self._running)
            cache.schedule(sequence, end)
        samples = end == sequence.input_tokens
        self.chunks.append(Chunk(sequence, new_tokens, end - new_tokens, samples=samples))


def _none_cached(sequence: Sequence) -> int:
    return 0


class Headroom:
    """A worker's free seats, memory and places for adapters, less those of sequences counted in.

    Args:
        running: the batch.
        seats: number of sequences that may enter it.
        trial: memory test.
        adapters: adapters on the GPU; None: they are not used.
    """

    __slots__ = ("_adapter_keys", "_adapters", "_seats", "_trial")

    def __init__(self, running: Running, seats: int, trial: Trial, adapters: Residency | None) -> None:
        self._seats = seats
        self._trial = trial
        self._adapters = adapters
        self._adapter_keys: set[str] = set(running.adapter_keys)

    def has(self, sequence: Sequence) -> bool:
        """Return whether this sequence could enter too, possibly after a load of its adapter."""
        if self._seats < 1 or not self._trial.test(sequence).fits:
            return False
        adapters, adapter = self._adapters, sequence.adapter
        return adapter is None or adapters is None or adapters.has_place(adapter, self._adapter_keys)

    def take(self, sequence: Sequence) -> None:
        """Count a sequence in."""
        self._seats -= 1
        self._trial.take(sequence)
        if sequence.adapter is not None:
            self._adapter_keys.add(sequence.adapter.key)
