"""One request in a simulation: what the core knows of it, its hidden end, and what became of it."""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from lorrery.chassis.fault_rules import NO_FAULTS, RequestFaults
from lorrery.scheduler.core.refusals import Refusal
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.vocabulary.compiling import mypyc_attr
from lorrery.vocabulary.finish_reason import FinishReason
from lorrery.worker.device.output import Ending
from lorrery.worker.device.rows import DeviceSequence


@mypyc_attr(acyclic=True)
@dataclass(slots=True, eq=False, init=False)
class SimulatedRequest:
    """A request. The core gets its sequence, and nothing that leads from there to this object: no policy sees its end.

    Attributes:
        handle: the sequence's.
        sequence: what the core knows.
        ending: where the device ends it. It never depends on tokens, since no stop sequences are simulated.
        outcome: a key of `outcomes.STATUS`; None while it lives.
        detail: why it was refused or dropped.
        reason: why it finished.
        refusal: why its scheduler withdrew it from a worker's queue; None: it did not.
        finished_ps: its end, of whatever kind.
        left_ps: when its scheduler had done with it, if its client saw its end later (a stall).
        last_token_ps: when its last token came, if that was before its end: it was held (static batching), or its last
            step gave none (llm-mock).
        output_tokens: tokens that its client has got in the end.
        shard: index of the scheduler that has it.
        worker: who ran it last; empty if nobody did.
        faults: on request; what it is to meet.
    """

    handle: int
    sequence: Sequence
    ending: Ending
    outcome: str | None
    detail: str
    reason: FinishReason | None
    refusal: Refusal | None
    finished_ps: int | None
    left_ps: int | None
    last_token_ps: int | None
    output_tokens: int
    shard: int
    worker: str
    faults: RequestFaults

    def __init__(
        self,
        handle: int,
        prompt_tokens: int,
        max_new_tokens: int,
        arrived_ps: int,
        ending: Ending,
        adapter: Adapter | None = None,
        tenant_id: str = "",
        prompt_token_ids: Tokens[int] = (),
    ) -> None:
        self.handle = handle
        self.sequence = Sequence(
            handle, prompt_tokens, max_new_tokens, arrived_ps, adapter, tenant_id, prompt_token_ids
        )
        self.ending = ending
        self.outcome = self.reason = self.refusal = None
        self.finished_ps = self.left_ps = self.last_token_ps = None
        self.output_tokens = self.shard = 0
        self.detail = self.worker = ""
        self.faults = NO_FAULTS

    @property
    def prompt_tokens(self) -> int:
        """Length of its prompt."""
        return self.sequence.prompt_tokens

    @property
    def max_new_tokens(self) -> int:
        """What it asks for at most."""
        return self.sequence.max_new_tokens

    @property
    def adapter(self) -> Adapter | None:
        """The adapter that it names; None: the base model."""
        return self.sequence.adapter

    @property
    def tenant_id(self) -> str:
        """Whose it is; may be empty."""
        return self.sequence.tenant_id

    @property
    def arrived_ps(self) -> int:
        """When it arrives; may be set until it has."""
        return self.sequence.arrived_ps

    @arrived_ps.setter
    def arrived_ps(self, at_ps: int) -> None:
        self.sequence.arrived_ps = at_ps

    @property
    def sent_ps(self) -> int:
        """When its client sent it; it arrives later if a fault delays it."""
        return self.sequence.arrived_ps - self.faults.delay_ps

    @property
    def admitted_ps(self) -> int | None:
        """Its last admission; None while it waits."""
        return self.sequence.admitted_ps

    @property
    def first_admitted_ps(self) -> int | None:
        """Its first admission."""
        return self.sequence.first_admitted_ps

    @property
    def first_cached_tokens(self) -> int:
        """Prompt tokens that were cached then."""
        return self.sequence.first_cached_tokens

    @property
    def first_token_ps(self) -> int | None:
        """When its first token came, if its client was still there."""
        first_ps, end_ps = self.sequence.first_token_ps, self.finished_ps
        return None if first_ps is not None and end_ps is not None and first_ps > end_ps else first_ps

    @property
    def produced_tokens(self) -> int:
        """Output made before it was last queued."""
        return self.sequence.produced_tokens

    @property
    def num_requeues(self) -> int:
        """How often it lost its place in a batch."""
        return self.sequence.num_requeues

    def device(self) -> DeviceSequence:
        """Return it as the device sees it when it joins, with what it has produced before."""
        sequence = self.sequence
        key, rank = ("", 0) if sequence.adapter is None else (sequence.adapter.key, sequence.adapter.rank)
        return DeviceSequence(
            self.handle, sequence.prompt_tokens, sequence.produced_tokens, 0, self.ending, None, key, rank
        )
