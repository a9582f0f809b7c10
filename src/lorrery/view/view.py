"""What the page draws beside the state in a frame: notices, and figures that need more than one frame.

They come from the model that the terminal shows too, and are sent in the frame itself, as its field `view`
(docs/monitoring.md).

Each viewer of the page has a model of its own, since watches begin at different times. At ten frames per second
a viewer costs the server 0.5 % of a core for 4 workers with 32 requests each, and 1.2 % for 16 with 64; half of it is
the view.
"""

from collections.abc import Iterable, Iterator

import msgspec

from lorrery.view.frame import Frame, Hello, encode
from lorrery.view.model import Model
from lorrery.view.notices import Notice, notices

VIEW_SECONDS = 0.4
"""Wall seconds between two views of a running cluster: the page's figures change no faster."""


class LostRow(msgspec.Struct, array_like=True, frozen=True):
    """A worker that was lost within the last minute: index of its scheduler, its name, and when it was lost."""

    shard: int
    id: str
    lost_at: float


class WorkerFigures(msgspec.Struct, array_like=True, frozen=True):
    """Figures of a worker, over 5 s; `busy_ratio` is the share of time in steps."""

    tokens_per_second: float
    busy_ratio: float


class AdapterFigures(msgspec.Struct, array_like=True, frozen=True):
    """Figures of an adapter; `key` is its name, or None for the base model.

    Attributes:
        on_gpus: number of GPUs that it is loaded on; `loading`: that it is being loaded to.
        thrash: loads soon after an eviction, in the last minute.
        is_gone: whether it is unloaded and its last request has ended.
    """

    key: str | None
    on_gpus: int
    loading: int
    thrash: int
    is_gone: bool


class TenantFigures(msgspec.Struct, array_like=True, frozen=True):
    """Figures of a tenant; shares of the tokens and of the requests are over 30 s, tokens per second over 5 s."""

    key: str
    token_share: float
    demand: float
    tokens_per_second: float


class View(msgspec.Struct, frozen=True):
    """Notices and figures as of a frame.

    Attributes:
        running: requests that run; `waiting`: that wait anywhere.
        kv_ratio: share of all KV pools together that is in use; `fullest_kv_ratio`: of the fullest.
        ttft: percentiles 50 and 95 over the requests that ended in the last 10 s; None: none did.
        workers: a row for each worker of the frame, in its order.
        adapters: those with figures other than 0, as of `tenants`.
    """

    notices: list[Notice]
    lost: list[LostRow]
    running: int
    waiting: int
    tokens_per_second: float
    ttft: tuple[float, float] | None
    kv_ratio: float
    fullest_kv_ratio: float
    workers: list[WorkerFigures]
    adapters: list[AdapterFigures]
    tenants: list[TenantFigures]


class _Viewed(msgspec.Struct, frozen=True):
    view: View


def view_of(model: Model) -> View:
    """Return the view of a model."""
    ttft = model.ttft
    return View(
        notices=notices(model),
        lost=[LostRow(worker.state.shard, worker.name, worker.lost_at or 0.0) for worker in model.lost],
        running=model.running,
        waiting=model.waiting,
        tokens_per_second=_rounded(model.tokens_per_second),
        ttft=None if ttft is None else (_rounded(ttft[0]), _rounded(ttft[1])),
        kv_ratio=_rounded(model.kv_ratio),
        fullest_kv_ratio=_rounded(max((worker.kv_ratio for worker in model.workers), default=0.0)),
        workers=[
            WorkerFigures(_rounded(worker.tokens_per_second), _rounded(worker.busy_ratio)) for worker in model.workers
        ],
        adapters=[
            AdapterFigures(adapter.key, adapter.on_gpus, adapter.loading, thrash, adapter.is_gone)
            for adapter in model.adapters.values()
            if (thrash := adapter.recent_thrash) or adapter.on_gpus or adapter.loading or adapter.is_gone
        ],
        tenants=[
            TenantFigures(
                key, _rounded(share.tokens), _rounded(share.demand), _rounded(model.tenants[key].tokens_per_second)
            )
            for key, share in model.shares().items()
            if share.tokens or share.demand
        ],
    )


def encode_viewed(frame: Frame, view: View | None) -> bytes:
    """Return a frame and its view as one line of JSON, without a line end."""
    line = encode(frame)
    return line if view is None else b"%s,%s" % (line[:-1], _encoder.encode(_Viewed(view))[1:])


class Watch:
    """The frames of one watch of a running cluster, as the page gets them."""

    def __init__(self, hello: Hello) -> None:
        self._model = Model(hello)
        self._viewed_at = float("-inf")
        self._lost: list[str] = []

    def begin(self, hello: Hello) -> None:
        """Continue with a new connection."""
        self._model.begin(hello)

    def line(self, frame: Frame, now: float) -> bytes:
        """Apply a frame and return its line, with a view if the last one is old or other workers are lost.

        Args:
            frame: the next one.
            now: wall seconds.
        """
        self._model.apply(frame)
        lost = [worker.key for worker in self._model.lost]
        if now - self._viewed_at < VIEW_SECONDS and lost == self._lost:
            return encode(frame)
        self._viewed_at, self._lost = now, lost
        return encode_viewed(frame, view_of(self._model))


def viewed_lines(hello: Hello, frames: Iterable[Frame]) -> Iterator[bytes]:
    """Yield the lines of a record, each frame with its view, with line ends.

    Costs 1.2 ms of CPU per frame of 8 workers with 32 requests each.
    """
    model = Model(hello)
    yield encode(hello) + b"\n"
    for frame in frames:
        model.apply(frame)
        yield encode_viewed(frame, view_of(model)) + b"\n"


def _rounded(figure: float) -> float:
    return round(figure, 4)


_encoder = msgspec.json.Encoder()
