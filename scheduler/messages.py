"""What routers and workers say, in the scheduler's own types; `wire_routers` and `wire_workers` make them.

Fields named *_u32 are little-endian arrays that are passed on as they came.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lorrery.chassis.trace_context import TraceContext
from lorrery.scheduler.core.forecast import Pace
from lorrery.scheduler.core.plan import Ran
from lorrery.scheduler.core.quotas import Quota


class ProtocolError(ValueError):
    """A peer says what the protocol does not allow; the message says what."""


@dataclass(frozen=True, slots=True)
class Submit:
    """A request, or the rest of one.

    Attributes:
        handle: its name on the router's stream.
        produced: output that the router has already.
        sampling: what the device needs to make its tokens; passed on unread.
        resumed: asked for before, on a stream that broke.
        adapter_rank: of the adapter that its router takes it to have; 0: the router does not know.
        adapter_version: of that adapter; 0: as the settings list it.
        quota: what its API key may use; None: anything.
        time_left_ps: how long its client still waits; 0: for ever.
        trace: the span that it is part of; None: none.
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


@dataclass(frozen=True, slots=True)
class WorkerHello:
    """How a worker announces itself.

    Attributes:
        device: the settings that its steps and its memory follow from; empty: not said.
        pace: what its steps take; None: not said.
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


class StepReport(NamedTuple):
    """The outcome of one step; with `start_ps == end_ps` no step ran, and the plan ends at a boundary already told."""

    plan_id: int
    start_ps: int
    ran: Ran
    handles_u32: bytes
    token_ids_u32: bytes
    hand_back: bool


class Load(NamedTuple):
    """How much a scheduler has to do.

    Attributes:
        num_workers: that take new sequences.
        num_open: requests that have not ended.
        num_routers: that are connected.
    """

    num_workers: int
    num_open: int
    num_routers: int
