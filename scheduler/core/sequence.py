"""One request as the scheduler sees it, and where it stands.

A sequence never learns its true output length: an admission rule must not profit from knowing the future. Its current
length is derived from the batch's decode-step counter (`decode_step`), never counted up: a sequence stores the counter
at which it had no output yet (`base_step`).

A sequence that lost its worker (or was preempted) starts again as if its output so far were part of its prompt:
`input_tokens = prompt + produced`, `budget_tokens = max_new_tokens - produced`. It keeps its arrival.
"""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from fractions import Fraction

from lorrery.scheduler.core.phases import LoadEnd, Phases, split
from lorrery.vocabulary.adapter_log import adapter_key
from lorrery.vocabulary.compiling import mypyc_attr


class Adapter:
    """A LoRA adapter; equal ones are the same, and nobody changes one.

    No dataclass and no named tuple: a replica reads `key` and `slots` some fifty times a request, and there they would
    be calls, also compiled.

    Args:
        adapter_id: its name towards clients.
        rank: of its matrices.
        exact_slots: pool slots of its weights by their true size; None: S-LoRA's rule, 4 x rank, which is right for
            four adapted projections without grouped-query attention.
        version: of what the name stands for; 0: as the settings list it, else the number of the load at run time that
            brought it. What was computed or loaded for one version is of no use to another.

    Attributes:
        key: name and version in one: what residency, pins and caches go by.
        slots: that its weights take from the KV pool.
    """

    __slots__ = ("adapter_id", "exact_slots", "key", "rank", "slots", "version")

    def __init__(self, adapter_id: str, rank: int, exact_slots: int | None = None, version: int = 0) -> None:
        self.adapter_id = adapter_id
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
    """An input as prefix caches compare it, see `prefix_cache.content`.

    Attributes:
        data: what is known of it, unit by unit.
        unit_tokens: tokens that a unit stands for.
        unit_bytes: that it takes in `data`.
        num_tokens: that are known.
    """

    __slots__ = ("data", "num_tokens", "unit_bytes", "unit_tokens")

    def __init__(self, data: bytes, unit_tokens: int, unit_bytes: int, num_tokens: int) -> None:
        self.data = data
        self.unit_tokens = unit_tokens
        self.unit_bytes = unit_bytes
        self.num_tokens = num_tokens


@mypyc_attr(acyclic=True)
@dataclass(slots=True, eq=False, init=False)
class Sequence:
    """A request in a scheduler.

    Attributes:
        handle: its name towards workers; unique in one scheduler.
        arrived_ps: first arrival, device picoseconds; orders the queue, also after a loss.
        adapter: None is the base model, which counts as rank 0.
        prompt_token_ids: what prefix caches look at; may be empty where no cache does.
        output_token_ids: a view of the whole output, as it grows (or as it will be: it is read for tokens already
            produced only); may be empty where no prefix cache keeps output.
        content: what prefix caches compare of its input; None: not looked at yet. A driver that knows more than tokens
            sets it.
        produced_tokens: output made before this sequence was last queued.
        input_tokens: what its next prefill has to hold: prompt + produced. Kept, since it is read a dozen times in a
            sequence's life; only `requeue` changes these three.
        budget_tokens: what it may still produce: maximum - produced.
        base_step: the decode-step counter at which it had no output in this batch; set when it joins.
        cached_tokens: leading input tokens that a prefix cache already held when it was admitted.
        computed_tokens: input tokens in the cache while it is in prefill.
        held_output_tokens: its output in this batch, once it has ended and is held (static batching).
        admitted_ps: last admission into a batch, or None while it waits.
        first_admitted_ps: its first admission; `first_cached_tokens` are the prompt tokens that were cached then. Both
            stay as they are when it is queued again.
        first_token_ps: its first token.
        load_end: while it waits for its adapter, and `load_wait_ps` since when: the end of that load. Where its prefill
            step waits, it stays.
        queue_load_ps: waits for its adapter that are over, before its first admission.
        prefill_load_ps: the same, from then to its first token.
        num_losses: workers that were lost with it in their batch.
        weight: its tenant's under a policy that is fair between tenants; None: as the settings say.
        deadline_ps: who still waits for its first admission then has waited in vain; None: nobody has said.
        num_overtaken: sequences that have entered past it while it waited for its adapter.
        worker: name of the one that got it last, which may have lost it since; empty: none has.
        aborted: strict S-LoRA only: cancelled, but not yet removed.
        dropped: its queue has dropped it, which ends it; a queue that has it nevertheless is wrong.
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
    worker: str
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
        self.first_cached_tokens = self.num_losses = self.num_overtaken = 0
        self.admitted_ps = self.first_admitted_ps = self.first_token_ps = None
        self.load_end = None
        self.load_wait_ps = self.queue_load_ps = self.prefill_load_ps = 0
        self.weight = None
        self.deadline_ps = None
        self.worker = ""
        self.aborted = self.dropped = False

    @property
    def finish_step(self) -> int:
        """The decode-step counter at which its budget is used up, if nothing ends it before."""
        return self.base_step + self.budget_tokens

    def output_tokens_at(self, decode_step: int) -> int:
        """Tokens produced in its present batch, at this value of the decode-step counter."""
        return decode_step - self.base_step

    def await_adapter(self, load_end: LoadEnd, at_ps: int) -> None:
        """Begin to wait for its adapter, unless it waits for that load already or has its first token."""
        if load_end is self.load_end:
            return
        self.leave_load(at_ps)
        if self.first_admitted_ps is None or (self.first_token_ps is None and not self.produced_tokens):
            self.load_end, self.load_wait_ps = load_end, at_ps

    def leave_load(self, at_ps: int) -> None:
        """Wait for its adapter no longer."""
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
        """Return where its time goes that ends then; see `core.phases`."""
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
        """Turn what it has produced in its last batch into input, and wait again."""
        self.leave_load(at_ps)
        self.produced_tokens += output_tokens
        self.input_tokens += output_tokens
        self.budget_tokens -= output_tokens
        if output_tokens and self.content is not None and self.content.unit_tokens == 1:
            self.content = None
        if self.admitted_ps is not None:
            self.num_requeues += 1
        self.admitted_ps = None
        self.cached_tokens = self.computed_tokens = self.num_overtaken = 0
