"""The data shown of a cluster: one hello, then frames, each the state at one moment (docs/monitoring.md).

Times are device seconds. Rows that occur by the thousand are JSON arrays, everything else objects. Adapters and tenants
are indices into tables of names, which grow as names appear: a frame lists the names that are new since the previous
one. Counts are cumulative unless a field says otherwise.
"""

from collections.abc import AsyncIterator
from typing import Final, Literal, Protocol, get_args

import msgspec

from lorrery.service.errors import InvalidRequest

MIN_HZ: Final = 1.0
MAX_HZ: Final = 20.0
USUAL_HZ: Final = 10.0
"""Frames per wall second."""


def checked_hz(hz: float) -> float:
    """Return the rate to use; 0 selects the usual one.

    Raises:
        InvalidRequest: it is out of range.
    """
    if not hz:
        return USUAL_HZ
    if not MIN_HZ <= hz <= MAX_HZ:  # also rejects NaN
        raise InvalidRequest(
            f"hz is {hz:g}; it must be from {MIN_HZ:g} to {MAX_HZ:g}, or 0 for {USUAL_HZ:g}",
            field="hz",
            value=hz,
            limit=MAX_HZ,
        )
    return hz


BASE_MODEL = -1
"""Adapter index of the base model."""
NO_WORKER = -1
"""Worker index of a request that ended without a worker."""
ON_GPU, IN_USE, LOADING = 0, 1, 2
"""States of an adapter on a worker."""
MAX_ENDED = 200
"""Upper bound on the ended requests in a frame."""
MAX_EVENTS = 50
"""Upper bound on the events in a frame."""

StepKind = Literal["prefill", "decode", "mixed", "idle"]
EventKind = Literal[
    "load", "evict", "load_failed", "preempt", "worker_lost", "worker_joined", "worker_draining", "moved", "refused",
    "fault",
]  # fmt: skip


class Hello(msgspec.Struct, frozen=True):
    """Description of the source of frames.

    Attributes:
        source: a running cluster, or a record, which has an end.
        time_scale: wall seconds per device second; of a record, that of the clock of its run.
        first: time of the first frame; 0 for a live feed.
        last: time of a record's last frame.
        frame_seconds: device seconds between two frames of a record.
    """

    source: Literal["live", "record"]
    model: str
    title: str
    version: str
    time_scale: float = 1.0
    first: float = 0.0
    last: float | None = None
    frame_seconds: float | None = None


class RunningRow(msgspec.Struct, array_like=True, frozen=True):
    """A sequence in a batch; `request` is unique in a feed, `output_tokens` counts the tokens produced so far."""

    request: int
    adapter: int
    tenant: int
    prompt_tokens: int
    output_tokens: int


class ResidentRow(msgspec.Struct, array_like=True, frozen=True):
    """An adapter on a GPU; `loaded_in`: seconds until its load completes, 0 if it is loaded."""

    adapter: int
    state: int
    rank: int
    loaded_in: float = 0.0


class Shard(msgspec.Struct, frozen=True):
    """A scheduler, and whether it is connected."""

    address: str
    connected: bool


class Worker(msgspec.Struct, frozen=True):
    """A worker as its scheduler sees it.

    Attributes:
        shard: index of its scheduler.
        tp: degree of tensor parallelism, in GPUs.
        waiting: sequences in its queue; `oldest`: how long the first of them has waited, 0 if there is none.
        kv: tokens of the KV pool in use, out of `pool`.
        host: number of adapters in host memory.
        step: duration of its last step; 0 while it is idle.
        tokens: output tokens since it attached; `busy` and `preempted`: seconds spent in steps and preemptions since
            then.
        late: seconds since then that it stood idle although it had a plan: the machine is short of CPU.
    """

    id: str
    shard: int
    gpu: str
    tp: int
    state: Literal["ready", "draining"]
    running: list[RunningRow]
    waiting: int
    oldest: float
    kv: int
    pool: int
    adapters: list[ResidentRow]
    host: int
    step: float
    kind: StepKind
    tokens: int
    busy: float
    preempted: int
    late: float = 0.0


class TenantRow(msgspec.Struct, array_like=True, frozen=True):
    """A tenant's current requests, and its totals."""

    tenant: int
    running: int
    waiting: int
    oldest: float
    output_tokens: int
    refused: int


class AdapterRow(msgspec.Struct, array_like=True, frozen=True):
    """An adapter's current requests, and its totals, over all workers.

    Attributes:
        thrash: number of loads soon after an eviction.
        unloaded: whether it is refused to new requests.
    """

    adapter: int
    running: int
    waiting: int
    loads: int
    evictions: int
    thrash: int
    unloaded: bool = False


class Totals(msgspec.Struct, frozen=True):
    """Counts of the whole cluster since it started, or over the whole record."""

    requests: int = 0
    finished: int = 0
    refused: int = 0
    cancelled: int = 0
    dropped: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    preempted: int = 0
    moved: int = 0
    workers_lost: int = 0
    loads: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


class EndedRow(msgspec.Struct, array_like=True, frozen=True):
    """A request that has ended since the previous frame, with its times by phase.

    Attributes:
        worker: index into this frame's workers, or `NO_WORKER`.
        outcome: its finish reason, or why it failed.
    """

    request: int
    worker: int
    adapter: int
    tenant: int
    prompt_tokens: int
    output_tokens: int
    arrived: float
    queue: float
    adapter_load: float
    prefill: float
    decode: float
    outcome: str


class EventRow(msgspec.Struct, array_like=True, frozen=True):
    """An event since the previous frame, or in the first frame of a watch also a recent one before it."""

    at: float
    kind: EventKind
    text: str


class MissingRow(msgspec.Struct, array_like=True, frozen=True):
    """A worker that was lost at a time, and is neither back nor replaced by another with a pool of that size."""

    shard: int
    id: str
    gpu: str
    tp: int
    pool: int
    lost_at: float


class FaultRow(msgspec.Struct, array_like=True, frozen=True):
    """An injected fault that is on; `met`: how often it has happened, None: not counted in a simulation."""

    rule: str
    met: int | None = None


class ObjectiveRow(msgspec.Struct, array_like=True, frozen=True):
    """Counts against an objective of `vocabulary.objectives`: what it covers, and what has missed it."""

    name: str
    counted: int
    missed: int


class Frame(msgspec.Struct, frozen=True):
    """The state at one moment.

    Attributes:
        unplaced: requests that wait for a worker; `held`: for their key's quota.
        faults: of workers and loads, and of requests at this router.
        objectives: of this router's requests since it started, or of all in the record.
    """

    at: float
    adapters_new: list[str]
    tenants_new: list[str]
    shards: list[Shard]
    workers: list[Worker]
    unplaced: int
    held: int
    tenants: list[TenantRow]
    adapters: list[AdapterRow]
    totals: Totals
    ended: list[EndedRow]
    ended_more: int
    events: list[EventRow]
    events_more: int
    missing: list[MissingRow] = []
    faults: list[FaultRow] = []
    objectives: list[ObjectiveRow] = []


class Feed(Protocol):
    """Provides frames of a running cluster to any number of concurrent watchers."""

    async def hello(self) -> Hello:
        """Return the description of the source.

        Raises:
            LorreryError: the cluster does not answer.
        """
        ...

    def frames(self, hz: float = USUAL_HZ) -> AsyncIterator[Frame]:
        """Watch the cluster until the iterator is closed; a slow reader misses frames.

        Args:
            hz: frames per wall second.

        Raises:
            LorreryError: the watch has ended; the message says why.
        """
        ...


def event_kind(text: str) -> EventKind | None:
    """Return the event kind with this name; None: a kind of a later version."""
    return _KINDS.get(text)


def kind_of(*, prefills: bool, decodes: bool) -> StepKind:
    """Return the kind of a step from whether it computes prompts and whether it decodes."""
    if prefills:
        return "mixed" if decodes else "prefill"
    return "decode" if decodes else "idle"


_KINDS: dict[str, EventKind] = {kind: kind for kind in get_args(EventKind)}
_encoder = msgspec.json.Encoder()
_hellos = msgspec.json.Decoder(Hello)
_frames = msgspec.json.Decoder(Frame)


def encode(one: Hello | Frame) -> bytes:
    """Return a hello or a frame as one line of JSON, without a line end."""
    return _encoder.encode(one)


def decode_hello(line: bytes) -> Hello:
    """Parse a hello.

    Raises:
        msgspec.MsgspecError: it is not a hello.
    """
    return _hellos.decode(line)


def decode_frame(line: bytes) -> Frame:
    """Parse a frame.

    Raises:
        msgspec.MsgspecError: it is not a frame.
    """
    return _frames.decode(line)
