"""One walk over waiting sequences: who enters the batch now.

A queue says in which order to try; this says whether one may enter, under three limits:

* memory, as the replica's memory rule has it;
* count: sequences in the batch;
* prompt: tokens that the new batch may compute;

and its adapter must be there, or on its way where the prefill step waits for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from scheduler.core.memory.base import Check, Trial
from scheduler.core.sequence import Sequence


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
        max_sequences: in the batch.
        max_prompt_tokens: that one admission walk may take.
        cached_count: whether tokens that a prefix cache holds count against `max_prompt_tokens`.
        partial: whether the last sequence may have more tokens than are left of `max_prompt_tokens` (chunked prefill).
    """

    max_sequences: int
    max_prompt_tokens: int
    cached_count: bool = True
    partial: bool = False


class Walk:
    """One admission walk.

    Args:
        trial: memory.
        limits: count and prompt.
        cached_tokens: how many leading tokens of a sequence need no computation.
        has_adapter: asks for a sequence's adapter; called last, for those that pass otherwise.
        on_take: told of every sequence that has passed, before the next is tried.
        on_check: told of every memory test, in order; for validation and study.

    Attributes:
        admitted: who has passed, in order.
        refused: the last sequence that did not pass, and the limit it met.
    """

    def __init__(
        self,
        trial: Trial,
        limits: BatchLimits,
        cached_tokens: Callable[[Sequence], int],
        has_adapter: Callable[[Sequence], bool] = lambda sequence: True,
        on_check: Callable[[Check], None] | None = None,
        on_take: Callable[[Sequence], None] = lambda sequence: None,
    ) -> None:
        self.admitted: list[Sequence] = []
        self.refused: tuple[Sequence, Blocked] | None = None
        self._trial = trial
        self._limits = limits
        self._cached_tokens = cached_tokens
        self.has_adapter = has_adapter
        self._on_check = on_check
        self._on_take = on_take
        self._prompt_tokens = 0

    def admit(self, sequence: Sequence) -> bool:
        """Test a sequence, and take it if it passes; return whether it did."""
        check = self._trial.test(sequence)
        few_enough = check.num_sequences <= self._limits.max_sequences
        if self._on_check is not None:
            self._on_check(
                Check(sequence, check.peak_tokens, check.adapter_slots, check.num_sequences, check.fits and few_enough)
            )
        prompt_tokens = sequence.input_tokens
        if not self._limits.cached_count:
            prompt_tokens -= self._cached_tokens(sequence)
        if not few_enough:
            blocked = Blocked.COUNT
        elif not check.fits:
            blocked = Blocked.MEMORY
        elif self._prompt_tokens + (1 if self._limits.partial else prompt_tokens) > self._limits.max_prompt_tokens:
            blocked = Blocked.PROMPT
        elif not self.has_adapter(sequence):
            blocked = Blocked.ADAPTER
        else:
            self._trial.take(sequence)
            self._prompt_tokens += prompt_tokens
            self.admitted.append(sequence)
            self._on_take(sequence)
            return True
        self.refused = (sequence, blocked)
        return False
