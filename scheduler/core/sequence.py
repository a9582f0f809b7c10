"""One request as the scheduler sees it, and where it stands.

A sequence never learns its true output length: an admission rule must not profit from knowing the future. Its current
length is derived from the batch's decode-step counter (`decode_step`), never counted up: a sequence stores the counter
at which it had no output yet (`base_step`).

A sequence that lost its worker (or was preempted) starts again as if its output so far were part of its prompt:
`input_tokens = prompt + produced`, `budget_tokens = max_new_tokens - produced`. It keeps its arrival.
"""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from typing import NamedTuple


class Adapter(NamedTuple):
    """A LoRA adapter: its id and rank."""

    adapter_id: str
    rank: int


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in a scheduler.

    Attributes:
        handle: its name towards workers; unique in one scheduler.
        arrived_ps: first arrival, device picoseconds; orders the queue, also after a loss.
        adapter: None is the base model, which counts as rank 0.
        prompt_token_ids: what prefix caches look at; may be empty where no cache does.
        produced_tokens: output made before this sequence was last queued.
        base_step: the decode-step counter at which it had no output in this batch; set when it joins.
        cached_tokens: leading prompt tokens that a prefix cache already held when it was admitted.
        admitted_ps: last admission into a batch, or None while it waits.
        aborted: strict S-LoRA only: cancelled, but not yet removed.
    """

    handle: int
    prompt_tokens: int
    max_new_tokens: int
    arrived_ps: int = 0
    adapter: Adapter | None = None
    tenant_id: str = ""
    prompt_token_ids: Tokens[int] = ()
    produced_tokens: int = 0
    base_step: int = 0
    cached_tokens: int = 0
    admitted_ps: int | None = None
    first_token_ps: int | None = None
    num_requeues: int = 0
    aborted: bool = False

    @property
    def input_tokens(self) -> int:
        """Tokens its next prefill has to hold: the prompt and what was produced before."""
        return self.prompt_tokens + self.produced_tokens

    @property
    def budget_tokens(self) -> int:
        """Tokens it may still produce, counted from when it was last queued."""
        return self.max_new_tokens - self.produced_tokens

    @property
    def finish_step(self) -> int:
        """The decode-step counter at which its budget is used up, if nothing ends it before."""
        return self.base_step + self.budget_tokens

    def output_tokens(self, decode_step: int) -> int:
        """Tokens produced in its present batch, at this value of the decode-step counter."""
        return decode_step - self.base_step

    def requeue(self, decode_step: int | None) -> None:
        """Turn output into input; `decode_step` is None if the sequence was not decoding."""
        if decode_step is not None:
            self.produced_tokens += self.output_tokens(decode_step)
        if self.admitted_ps is not None:
            self.num_requeues += 1
        self.admitted_ps = None
        self.cached_tokens = 0
