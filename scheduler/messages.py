"""Messages of routers and workers in the scheduler's own types; `wire_routers` and `wire_workers` make them.

Fields named *_u32 are little-endian arrays that are passed on unchanged.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lorrery.scheduler.core.front_end import NO_FRONT_END
from lorrery.scheduler.core.placements.forecast import Pace
from lorrery.scheduler.core.plan import Ran
from lorrery.scheduler.core.quotas import Quota
from lorrery.service.telemetry.output_groups import OutputGroup
from lorrery.service.telemetry.spans import TraceContext


class ProtocolError(ValueError):
    """A peer's message violates the protocol; the text says how."""


@dataclass(frozen=True, slots=True)
class Submit:
    """A request, or the rest of one.

    Attributes:
        handle: its handle on the router's stream.
        produced: output that the router already has.
        sampling: what the device needs to make its tokens; passed on unread.
        resumed: whether it was submitted before, on a stream that broke.
        adapter_rank: of the adapter that the router resolved; 0: unknown to the router.
        adapter_version: of that adapter; 0: as listed in the settings.
        quota: what its API key may use; None: no limits.
        time_left_ps: how long its client still waits; 0: for ever.
        trace: the span that it is part of; None: none.
        ignore_eos: whether it goes on after an end-of-sequence token.
        priority: a lower one is earlier, if the policy reads it.
        skips_prefix_cache: whether every position of its prompt has to be computed.
        group: the request of a client that it is one output of; None: it is the only one.
        cache_salt: prompts with different ones share no cached prefix.
        only_counted_tokens: what it counts with against its quota, without being generated; None: it is.
    """

    handle: int
    request_id: str
    adapter_id: str
    tenant_id: str
    prompt_token_ids_u32: bytes
    max_new_tokens: int
    sampling: object
    produced: "array[int]" = field(default_factory=lambda: array("I"))
    resumed: bool = False
    adapter_rank: int = 0
    adapter_version: int = 0
    quota: Quota | None = None
    time_left_ps: int = 0
    trace: TraceContext | None = None
    ignore_eos: bool = False
    priority: int = 0
    skips_prefix_cache: bool = False
    group: OutputGroup | None = None
    cache_salt: str = ""
    only_counted_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerHello:
    """A worker's announcement.

    Attributes:
        device: the settings that determine its steps and its memory; empty: unknown.
        pace: its step times; None: unknown.
        front_end: its work on requests before they reach its queue: the fields of `FrontEndCost`.
    """

    worker_id: str
    gpu: str
    model: str
    tensor_parallel: int
    max_total_token_num: int
    step_time_model: str
    needs_prompts: bool
    device: Mapping[str, Any] = field(default_factory=dict)
    pace: Pace | None = None
    front_end: tuple[int, int, int] = NO_FRONT_END


class StepReport(NamedTuple):
    """The outcome of one step; if `start_ps == end_ps` no step ran, and the plan ends at a boundary reported before."""

    plan_id: int
    start_ps: int
    ran: Ran
    handles_u32: bytes
    token_ids_u32: bytes
    hand_back: bool


class Load(NamedTuple):
    """A scheduler's load.

    Attributes:
        num_workers: workers that accept new sequences.
        num_open: requests that have not ended.
        num_routers: connected routers.
    """

    num_workers: int
    num_open: int
    num_routers: int
