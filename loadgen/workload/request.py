"""What a workload is: requests with intended send times, lengths and names, in send order.

A workload says what a client means to do, not what a cluster makes of it. It comes from a generator (`slora`,
`arrivals`) or a public trace (`azure`, `mooncake`), and it feeds the live driver and the simulator alike.
"""

from dataclasses import dataclass

__all__ = ["TraceError", "WorkloadRequest"]


class TraceError(ValueError):
    """A trace cannot be read; the message names the line."""


@dataclass(slots=True)
class WorkloadRequest:
    """One request as its client intends it. Nobody changes it; a frozen record takes three times as long to make.

    Attributes:
        index: position in the workload, from 0; it seeds the prompt and the output.
        at_seconds: intended send time in device seconds from the start of the run, never below 0.
        prompt_tokens: length of the prompt, at least 1.
        output_tokens: true length of the output, at least 1. No scheduling decision may see it.
        adapter_id: the LoRA adapter, or None for the base model.
        tenant_id: on whose behalf; empty if nobody's.
        hash_ids: ids of consecutive 512-token blocks of the prompt (equal leading ids: equal prefix), or None if
            unknown. `len(hash_ids) == ceil(prompt_tokens / 512)`.
    """

    index: int
    at_seconds: float
    prompt_tokens: int
    output_tokens: int
    adapter_id: str | None = None
    tenant_id: str = ""
    hash_ids: tuple[int, ...] | None = None
