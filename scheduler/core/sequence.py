"""One request as the scheduler sees it, and its progress.

A sequence never learns its true output length: an admission rule must not profit from knowing the future. Its current
length is derived from the batch's decode-step counter (`decode_step`), never counted up: a sequence stores the
counter's value at which it had no output yet (`base_step`).

A sequence that lost its worker (or was preempted) starts again as if its output so far were part of its prompt:
`input_tokens = prompt + produced`, `budget_tokens = max_new_tokens - produced`. It keeps its arrival.
"""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from lorrery.vocabulary.adapters import adapter_key
from lorrery.vocabulary.compiling import mypyc_attr
from lorrery.vocabulary.endings import CancelCause


@mypyc_attr(acyclic=True)
class LoadEnd:
    """The end of a load that sequences wait for; they share it, and read the time when they leave.

    Attributes:
        at_ps: when the adapter was loaded; None: not yet.
    """

    __slots__ = ("at_ps",)

    def __init__(self) -> None:
        self.at_ps: int | None = None


class Phases(NamedTuple):
    """How a request's time divides: four phases, in picoseconds, that add up to its time in the scheduler.

        queue         arrival -> first admission, less adapter_load
        adapter_load  before its first token, while only its own adapter is missing
        prefill       first admission -> first token, less adapter_load
        decode        first token -> end

    `adapter_load` begins when an admission pass finds that a sequence lacks only its adapter, and ends when that has
    been loaded, or when the sequence leaves the queue: the wait for a place on the GPU, if adapters in use hold all of
    them, is included. Under blocking loads it is the rest of its own adapter's load when the sequence is admitted; its
    prefill step may wait longer, for other adapters, which counts as prefill.

    A preemption, a loss and the recomputation after it count where they happen: in prefill before the first token, in
    decode after it. A request that brings tokens from another scheduler has no prefill: it decodes from its admission.
    A phase that has not begun at the end has zero time.
    """

    queue_ps: int
    adapter_load_ps: int
    prefill_ps: int
    decode_ps: int


def split(
    arrived_ps: int, admitted_ps: int, first_token_ps: int, end_ps: int, queue_load_ps: int, prefill_load_ps: int
) -> Phases:
    """Split a request's time from its arrival to its end.

    Args:
        arrived_ps: its arrival.
        admitted_ps: its first admission; the end, if there was none.
        first_token_ps: its first token; the end, if there was none.
        end_ps: its end; later times count as this, since a client may leave before the step ends that it waits for.
        queue_load_ps: waits for its adapter before its first admission.
        prefill_load_ps: waits for its adapter after it.
    """
    end_ps = max(end_ps, arrived_ps)
    admitted_ps = min(max(admitted_ps, arrived_ps), end_ps)
    first_token_ps = max(admitted_ps, min(first_token_ps, end_ps))  # workers' clocks may differ
    queue_ps, prefill_ps = admitted_ps - arrived_ps, first_token_ps - admitted_ps
    queue_load_ps, prefill_load_ps = min(queue_load_ps, queue_ps), min(prefill_load_ps, prefill_ps)
    return Phases(
        queue_ps - queue_load_ps,
        queue_load_ps + prefill_load_ps,
        prefill_ps - prefill_load_ps,
        end_ps - first_token_ps,
    )


class Adapter:
    """A LoRA adapter. Adapters compare by value and must not be changed.

    Neither dataclass nor named tuple: a replica reads `key` and `slots` some fifty times a request, and there each read
    would be a call, even if compiled.

    Args:
        adapter_id: its name in the API.
        rank: of its matrices.
        exact_slots: pool slots of its weights by their true size; None: S-LoRA's rule, 4 x rank, which is right for
            four adapted projections without grouped-query attention.
        version: 0: as listed in the settings; otherwise the number of the run-time load that brought it. Nothing
            computed or loaded for one version is valid for another.
        number: for clients that know adapters by number, from 1; 0: it has none. It does not count in comparisons.

    Attributes:
        key: name and version in one: the key of residency, pins and caches.
        slots: KV pool slots that its weights take.
    """

    __slots__ = ("adapter_id", "exact_slots", "key", "number", "rank", "slots", "version")

    def __init__(
        self, adapter_id: str, rank: int, exact_slots: int | None = None, version: int = 0, number: int = 0
    ) -> None:
        self.adapter_id = adapter_id
        self.number = number
        self.rank = rank
        self.exact_slots = exact_slots
        self.version = version
        self.key = adapter_key(adapter_id, version) if version else adapter_id
        self.slots = 4 * rank if exact_slots is None else exact_slots

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Adapter):
            return NotImplemented
        return self is other or (
            (self.adapter_id, self.version) == (other.adapter_id, other.version)
            and (self.rank, self.exact_slots) == (other.rank, other.exact_slots)
        )

    def __lt__(self, other: "Adapter") -> bool:
        return (self.adapter_id, self.version) < (other.adapter_id, other.version)

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"Adapter({self.adapter_id!r}, {self.rank}, {self.exact_slots}, {self.version})"


@mypyc_attr(acyclic=True)
class Content:
    """An input in the form that prefix caches compare, see `prefix_cache.base`.

    Attributes:
        data: the known input, unit by unit.
        unit_tokens: tokens per unit.
        unit_bytes: bytes per unit in `data`.
        num_tokens: known tokens.
    """

    __slots__ = ("data", "num_tokens", "unit_bytes", "unit_tokens")

    def __init__(self, data: bytes, unit_tokens: int, unit_bytes: int, num_tokens: int) -> None:
        self.data = data
        self.unit_tokens = unit_tokens
        self.unit_bytes = unit_bytes
        self.num_tokens = num_tokens


@mypyc_attr(acyclic=True)
class Withdrawal:
    """The cancel of a sequence.

    Attributes:
        cause: why it was cancelled.
        at_ps: its stamp.
        kept_tokens: output that its client has, or would have; None: all that it has produced.
        by_scheduler: whether the scheduler cancelled it, and its client has been told why.
    """

    __slots__ = ("at_ps", "by_scheduler", "cause", "kept_tokens")

    def __init__(self, cause: CancelCause, at_ps: int, kept_tokens: int | None = None) -> None:
        self.cause = cause
        self.at_ps = at_ps
        self.kept_tokens = kept_tokens
        self.by_scheduler = False


@mypyc_attr(acyclic=True)
@dataclass(slots=True, eq=False, init=False)
class Sequence:
    """A request in a scheduler.

    Attributes:
        handle: its id towards workers; unique in one scheduler.
        arrived_ps: first arrival, device picoseconds; orders the queue, also after a loss.
        adapter: None is the base model, which counts as rank 0.
        prompt_token_ids: compared by prefix caches; may be empty without one.
        output_token_ids: a view of the whole output, as it grows (or the complete output: only tokens already produced
            are read); may be empty if no prefix cache keeps output.
        content: the input as prefix caches compare it; None: not built yet. A driver that knows more than tokens sets
            it.
        produced_tokens: output produced before this sequence was last queued.
        input_tokens: tokens of its next prefill: prompt + produced. Stored, since it is read a dozen times in a
            sequence's life; only `requeue` changes these three.
        budget_tokens: tokens it may still produce: maximum - produced.
        base_step: the decode-step counter at which it had no output in this batch; set when it joins.
        entered: number of its last admission, counted in its batch: the order of the batch.
        priority: a lower one is earlier (`policy = "priority"`).
        cache_salt: prompts with different ones share no cached prefix.
        cached_tokens: leading input tokens that a prefix cache already held when it was admitted.
        computed_tokens: input tokens in the KV cache while it is in prefill.
        held_output_tokens: its output in this batch, once it has ended and is held (static batching).
        admitted_ps: last admission into a batch, or None while it waits.
        first_admitted_ps: its first admission; `first_cached_tokens` are the prompt tokens that were cached then. Both
            stay as they are when it is queued again.
        first_token_ps: time of its first token.
        load_end: the end of the adapter load that it waits for; `load_wait_ps` is when that wait began. Kept during a
            prefill step that waits for the load.
        queue_load_ps: completed waits for its adapter before its first admission.
        prefill_load_ps: completed waits for its adapter from first admission to first token.
        num_losses: workers that were lost with it in their batch.
        weight: its tenant's weight under a policy that is fair between tenants; None: that of the settings.
        deadline_ps: it is refused if it still waits for its first admission at this time; None: no deadline.
        num_overtaken: sequences that have overtaken it while it waited for its adapter.
        ignore_eos: whether it goes on after an end-of-sequence token, so that it will use up its budget.
        skips_prefix_cache: whether every position of its input has to be computed, so that it takes nothing from a
            prefix cache, where what it computes is kept as for others.
        worker: name of the worker that got it last, which may be lost since; empty: none so far.
        withdrawal: its cancel, even before that takes effect; None: it is not cancelled.
        aborted: strict S-LoRA only: cancelled, but not yet removed.
        dropped: its queue has dropped it, which ends it; a queue that still has it is wrong.
    """

    handle: int
    prompt_tokens: int
    max_new_tokens: int
    arrived_ps: int
    adapter: Adapter | None
    tenant_id: str
    prompt_token_ids: Tokens[int]
    output_token_ids: Tokens[int]
    content: Content | None
    produced_tokens: int
    input_tokens: int
    budget_tokens: int
    base_step: int
    entered: int
    priority: int
    cache_salt: str
    cached_tokens: int
    computed_tokens: int
    held_output_tokens: int
    admitted_ps: int | None
    first_admitted_ps: int | None
    first_cached_tokens: int
    first_token_ps: int | None
    load_end: LoadEnd | None
    load_wait_ps: int
    queue_load_ps: int
    prefill_load_ps: int
    num_requeues: int
    num_losses: int
    weight: Fraction | None
    deadline_ps: int | None
    num_overtaken: int
    ignore_eos: bool
    skips_prefix_cache: bool
    worker: str
    withdrawal: Withdrawal | None
    aborted: bool
    dropped: bool

    def __init__(
        self,
        handle: int,
        prompt_tokens: int,
        max_new_tokens: int,
        arrived_ps: int = 0,
        adapter: Adapter | None = None,
        tenant_id: str = "",
        prompt_token_ids: Tokens[int] = (),
        output_token_ids: Tokens[int] = (),
        produced_tokens: int = 0,
    ) -> None:
        self.handle = handle
        self.prompt_tokens = prompt_tokens
        self.max_new_tokens = max_new_tokens
        self.arrived_ps = arrived_ps
        self.adapter = adapter
        self.tenant_id = tenant_id
        self.prompt_token_ids = prompt_token_ids
        self.output_token_ids = output_token_ids
        self.content = None
        self.produced_tokens = produced_tokens
        self.input_tokens = prompt_tokens + produced_tokens
        self.budget_tokens = max_new_tokens - produced_tokens
        self.base_step = self.cached_tokens = self.computed_tokens = self.held_output_tokens = self.num_requeues = 0
        self.first_cached_tokens = self.num_losses = self.num_overtaken = self.entered = self.priority = 0
        self.admitted_ps = self.first_admitted_ps = self.first_token_ps = None
        self.load_end = None
        self.load_wait_ps = self.queue_load_ps = self.prefill_load_ps = 0
        self.weight = None
        self.deadline_ps = None
        self.worker = self.cache_salt = ""
        self.withdrawal = None
        self.aborted = self.dropped = self.ignore_eos = self.skips_prefix_cache = False

    @property
    def finish_step(self) -> int:
        """The decode-step counter at which its budget is used up, if nothing ends it earlier."""
        return self.base_step + self.budget_tokens

    def output_tokens_at(self, decode_step: int) -> int:
        """Tokens produced in its present batch, at this value of the decode-step counter."""
        return decode_step - self.base_step

    def await_adapter(self, load_end: LoadEnd, at_ps: int) -> None:
        """Begin to wait for the adapter's load, unless it already does or has its first token."""
        if load_end is self.load_end:
            return
        self.leave_load(at_ps)
        if self.first_admitted_ps is None or (self.first_token_ps is None and not self.produced_tokens):
            self.load_end, self.load_wait_ps = load_end, at_ps

    def leave_load(self, at_ps: int) -> None:
        """Stop waiting for the adapter."""
        if self.load_end is None:
            return
        waited_ps = self._load_waited_ps(at_ps)
        if self.first_admitted_ps is None:
            self.queue_load_ps += waited_ps
        else:
            self.prefill_load_ps += waited_ps
        self.load_end = None

    def _load_waited_ps(self, at_ps: int) -> int:
        if self.load_end is None:
            return 0
        end_ps = self.load_end.at_ps
        return max(0, (at_ps if end_ps is None else min(at_ps, end_ps)) - self.load_wait_ps)

    def phases(self, end_ps: int) -> Phases:
        """Return how the time until `end_ps` divides into phases; see `Phases`."""
        admitted_ps, first_token_ps = self.first_admitted_ps, self.first_token_ps
        waited_ps = self._load_waited_ps(end_ps)
        if admitted_ps is None:
            return split(self.arrived_ps, end_ps, end_ps, end_ps, self.queue_load_ps + waited_ps, 0)
        if first_token_ps is None:
            first_token_ps = admitted_ps if self.produced_tokens else end_ps
        return split(
            self.arrived_ps, admitted_ps, first_token_ps, end_ps, self.queue_load_ps, self.prefill_load_ps + waited_ps
        )

    def requeue(self, output_tokens: int, at_ps: int) -> None:
        """Turn the output of its last batch into input, and wait again."""
        self.leave_load(at_ps)
        self.produced_tokens += output_tokens
        self.input_tokens += output_tokens
        self.budget_tokens -= output_tokens
        if self.admitted_ps is not None:
            self.num_requeues += 1
        self.admitted_ps = None
        self.cached_tokens = self.computed_tokens = self.num_overtaken = 0
