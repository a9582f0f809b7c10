"""One request in a simulation: what the core knows of it, its hidden end, and what became of it."""

from dataclasses import dataclass

from scheduler.core.plan import EndReason
from scheduler.core.sequence import Sequence
from worker.device.output import Ending, FinishReason
from worker.device.rows import DeviceSequence

_NO_ENDING = Ending(0, FinishReason.LENGTH)


@dataclass(slots=True, eq=False)
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

    ending: Ending = _NO_ENDING
    outcome: str | None = None
    detail: str = ""
    reason: EndReason | None = None
    first_admitted_ps: int | None = None
    first_cached_tokens: int = 0
    finished_ps: int | None = None
    last_token_ps: int | None = None
    output_tokens: int = 0
    shard: int = 0
    worker: str = ""

    def device(self) -> DeviceSequence:
        """Return it as the device sees it when it joins, with what it has produced before."""
        name, rank = ("", 0) if self.adapter is None else (self.adapter.adapter_id, self.adapter.rank)
        return DeviceSequence(self.handle, self.prompt_tokens, self.produced_tokens, 0, self.ending, None, name, rank)
