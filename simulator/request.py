"""One request in a simulation: what the core knows of it, its hidden end, and what became of it."""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.vocabulary.finish_reason import FinishReason
from lorrery.worker.device.output import Ending
from lorrery.worker.device.rows import DeviceSequence


@dataclass(slots=True, eq=False, init=False)
class SimulatedRequest(Sequence):
    """A request; the core sees it as a `Sequence` and nothing of what stands here.

    Attributes:
        ending: where the device ends it. It never depends on tokens, since no stop sequences are simulated.
        outcome: a key of `outcomes.STATUS`; None while it lives.
        detail: why it was refused or dropped.
        reason: why it finished.
        first_admitted_ps: its first admission.
        first_cached_tokens: prompt tokens that were cached then.
        finished_ps: its end, of whatever kind.
        last_token_ps: when its last token came, if that was before its end: it was held (static batching), or its last
            step gave none (llm-mock).
        output_tokens: tokens that its client has got in the end.
        shard: index of the scheduler that has it.
        worker: who ran it last; empty if nobody did.
    """

    ending: Ending
    outcome: str | None
    detail: str
    reason: FinishReason | None
    first_admitted_ps: int | None
    first_cached_tokens: int
    finished_ps: int | None
    last_token_ps: int | None
    output_tokens: int
    shard: int
    worker: str

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
        # A dataclass with slots is not the class that a plain super() finds.
        Sequence.__init__(self, handle, prompt_tokens, max_new_tokens, arrived_ps, adapter, tenant_id, prompt_token_ids)
        self.ending = ending
        self.outcome = self.reason = None
        self.first_admitted_ps = self.finished_ps = self.last_token_ps = None
        self.first_cached_tokens = self.output_tokens = self.shard = 0
        self.detail = self.worker = ""

    def device(self) -> DeviceSequence:
        """Return it as the device sees it when it joins, with what it has produced before."""
        name, rank = ("", 0) if self.adapter is None else (self.adapter.adapter_id, self.adapter.rank)
        return DeviceSequence(self.handle, self.prompt_tokens, self.produced_tokens, 0, self.ending, None, name, rank)
