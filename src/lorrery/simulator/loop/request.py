"""One request in a simulation: its sequence, its hidden end, and its outcome."""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from lorrery.scheduler.core.refusals import Refusal
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.service.faults.rules import NO_FAULTS, RequestFaults
from lorrery.vocabulary.compiling import mypyc_attr
from lorrery.vocabulary.endings import FinishReason
from lorrery.worker.device.output import Ending
from lorrery.worker.device.rows import DeviceSequence


@mypyc_attr(acyclic=True)
@dataclass(slots=True, eq=False, init=False)
class SimulatedRequest:
    """A request. The core gets only its sequence, which has no reference back: policies cannot see its end.

    Attributes:
        handle: the sequence's.
        sequence: the core's view.
        ending: where the device ends it. It never depends on tokens, since stop sequences are not simulated.
        outcome: a key of `outcomes.STATUS`; None until it ends.
        detail: why it was refused or dropped.
        reason: why it finished.
        refusal: why its scheduler withdrew it from a worker's queue; None: it did not.
        finished_ps: its end, of whatever kind.
        left_ps: when its scheduler was done with it, if its client saw its end later (a stall).
        last_token_ps: time of its last token, if before its end: it was held (static batching), or its last step gave
            no token (llm-mock).
        output_tokens: tokens that its client received in total.
        shard: index of its scheduler.
        worker: that ran it last; empty if none did.
        faults: injected into it.
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
        """Its limit on output tokens."""
        return self.sequence.max_new_tokens

    @property
    def adapter(self) -> Adapter | None:
        """Its adapter; None: the base model."""
        return self.sequence.adapter

    @property
    def tenant_id(self) -> str:
        """Its tenant; may be empty."""
        return self.sequence.tenant_id

    @property
    def arrived_ps(self) -> int:
        """Time of its arrival; may be set until then."""
        return self.sequence.arrived_ps

    @arrived_ps.setter
    def arrived_ps(self, at_ps: int) -> None:
        self.sequence.arrived_ps = at_ps

    @property
    def sent_ps(self) -> int:
        """Time when its client sent it; it arrives later if a fault delays it."""
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
        """Prompt tokens found in the prefix cache at its first admission."""
        return self.sequence.first_cached_tokens

    @property
    def first_token_ps(self) -> int | None:
        """Time of its first token, if its client was still there, and got it."""
        if self.outcome is not None and not self.output_tokens:
            return None
        first_ps, end_ps = self.sequence.first_token_ps, self.finished_ps
        return None if first_ps is not None and end_ps is not None and first_ps > end_ps else first_ps

    @property
    def produced_tokens(self) -> int:
        """Output tokens made before it was last queued."""
        return self.sequence.produced_tokens

    @property
    def num_requeues(self) -> int:
        """Times that it lost its place in a batch."""
        return self.sequence.num_requeues

    def device(self) -> DeviceSequence:
        """Return the device's view of it as it joins a batch, with its earlier output."""
        sequence = self.sequence
        key, rank = ("", 0) if sequence.adapter is None else (sequence.adapter.key, sequence.adapter.rank)
        return DeviceSequence(
            self.handle, sequence.prompt_tokens, sequence.produced_tokens, 0, self.ending, None, key, rank
        )
