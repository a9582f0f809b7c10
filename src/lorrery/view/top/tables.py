"""The tables: one row per worker, adapter, tenant or request, with sortable columns.

A column defines how its figure is shown, and when it is left out on a narrow terminal.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from lorrery.view.frame import RunningRow
from lorrery.view.top.model import BASE, NO_TENANT, Adapter, Ended, Model, Tenant, Worker, percentiles
from lorrery.view.top.names import plain
from lorrery.view.top.notices import SHARE_SECONDS, THRASH_SECONDS, tenant_shares, tenant_title

BUSY_SECONDS = 5.0
"""Window of a worker's busy share and tokens per second."""
_MAX_ENDED_SHOWN = 500


@dataclass(frozen=True, slots=True)
class Bar:
    """A share from 0 to 1 shown as a bar with a text beside it."""

    share: float
    text: str


Cell = str | Bar
Key = float | str
Mark = Literal["", "bad", "warn", "dim"]


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Attributes:
        keep: priority; the column with the lowest is left out first, and the first column always stays.
        is_name: may be truncated; names sort from A to Z, figures from the largest.
    """

    heading: str
    keep: int
    is_name: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One row: a cell and a sort key per column.

    Attributes:
        cells: called only for rows that are shown.
        mark: "bad" or "warn" to highlight the row; "dim" if it is idle.
    """

    cells: Callable[[], tuple[Cell, ...]]
    keys: tuple[Key, ...]
    mark: Mark = ""

    def matches(self, text: str) -> bool:
        """Return whether a name in the row contains `text`, ignoring case."""
        return any(text in key.casefold() for key in self.keys if isinstance(key, str))


@dataclass(frozen=True, slots=True)
class Table:
    """A table: its columns, and its rows computed from a model.

    Attributes:
        name: of its view, as typed by the user.
        sort: index of the initial sort column.
    """

    name: str
    columns: Sequence[Column]
    rows: Callable[[Model], Iterator[Row]] = field(repr=False)
    sort: int = 0


def seconds(value: float) -> str:
    """Format a duration with about three digits."""
    if value < 0.0005:
        return "0"
    if value < 1:
        return f"{value * 1e3:.0f}ms" if value >= 0.01 else f"{value * 1e3:.1f}ms"
    if value < 100:
        return f"{value:.1f}s"
    return f"{value:,.0f}s" if value < 10_000 else f"{value / 3600:.1f}h"


def count(value: float) -> str:
    """Format a number in at most six characters."""
    for limit, divisor, unit in ((1e5, 1, ""), (1e7, 1e3, "k"), (1e10, 1e6, "M"), (float("inf"), 1e9, "G")):
        if value < limit:
            return f"{value / divisor:,.0f}{unit}"
    raise AssertionError


def percent(value: float) -> str:
    """Format a share as a percentage."""
    return f"{value:.0%}"


def _time(value: float) -> str:
    return seconds(value) if value else "-"


_WORKERS = (
    Column("WORKER", 99, is_name=True),
    Column("DOES", 70, is_name=True),
    Column("BATCH", 90),
    Column("WAIT", 95),
    Column("OLDEST", 80),
    Column("KV", 85),
    Column("LORA", 60),
    Column("STEP", 40),
    Column("TOK/S", 75),
    Column("BUSY", 65),
    Column("GPU", 10, is_name=True),
    Column("HOST", 5),
    Column("PREEMPT", 4),
)


def _workers(model: Model) -> Iterator[Row]:
    for worker in (*model.workers, *model.lost):
        yield _worker(model, worker)


def _worker(model: Model, worker: Worker) -> Row:
    state, running = worker.state, len(worker.running)
    is_lost = worker.lost_at is not None
    name = f"{state.shard}/{worker.name}" if len(model.shards) > 1 else worker.name
    does = "lost" if is_lost else "draining" if state.state == "draining" else state.kind
    loading = sum(resident.loaded_in > 0 for resident in worker.resident)
    loaded = len(worker.resident) - loading
    step = state.step if running else 0.0
    oldest = state.oldest if worker.waiting else 0.0
    rate = 0.0 if is_lost else worker.tokens.rate(BUSY_SECONDS)
    busy = 0.0 if is_lost else min(1.0, worker.busy.rate(BUSY_SECONDS))
    gpu = f"{state.tp} x {state.gpu}" if state.tp > 1 else state.gpu

    def cells() -> tuple[Cell, ...]:
        return (
            plain(name), does, Bar(running / max(model.widest_batch, 1), count(running)), count(worker.waiting),
            seconds(oldest) if worker.waiting else "-", Bar(worker.kv_ratio, percent(worker.kv_ratio)),
            f"{loaded}+{loading}" if loading else f"{loaded}", seconds(step) if step else "-", count(rate),
            percent(busy), plain(gpu), count(state.host), count(state.preempted),
        )  # fmt: skip

    keys = (
        name, does, running, worker.waiting, oldest, worker.kv_ratio, loaded + loading, step, rate, busy, gpu,
        state.host, state.preempted,
    )  # fmt: skip
    return Row(cells, keys, _worker_mark(worker))


def _worker_mark(worker: Worker) -> Mark:
    if worker.lost_at is not None:
        return "bad"
    if worker.state.state == "draining":
        return "warn"
    return "" if worker.running or worker.waiting else "dim"


_ADAPTERS = (
    Column("ADAPTER", 99, is_name=True),
    Column("RUN", 95),
    Column("WAIT", 90),
    Column("GPUS", 80),
    Column("LOADING", 60),
    Column("LOADS", 70),
    Column("EVICT", 50),
    Column("THRASH", 75),
    Column("TTFT50", 65),
    Column("TTFT95", 40),
    Column("RANK", 10),
)


def _adapters(model: Model) -> Iterator[Row]:
    recent = _by(model.recent(), lambda one: one.adapter)
    for adapter in model.adapters.values():
        if not adapter.is_gone:
            yield _adapter(adapter, recent.get(adapter.name, ()))


def _adapter(adapter: Adapter, recent: Sequence[Ended]) -> Row:
    middle, high = percentiles(recent) or (0.0, 0.0)
    thrash = adapter.thrash.growth(THRASH_SECONDS)

    def cells() -> tuple[Cell, ...]:
        counts = (
            adapter.running, adapter.waiting, adapter.on_gpus, adapter.loading, adapter.loads.total,
            adapter.evictions.total, thrash,
        )  # fmt: skip
        return plain(adapter.name), *map(count, counts), _time(middle), _time(high), str(adapter.rank or "-")

    keys = (
        adapter.name, adapter.running, adapter.waiting, adapter.on_gpus, adapter.loading, adapter.loads.total,
        adapter.evictions.total, thrash, middle, high, adapter.rank,
    )  # fmt: skip
    return Row(cells, keys, _adapter_mark(adapter, thrash))


def _adapter_mark(adapter: Adapter, thrash: float) -> Mark:
    if thrash > 0:
        return "warn"
    return "" if adapter.running or adapter.waiting else "dim"


_TENANTS = (
    Column("TENANT", 99, is_name=True),
    Column("RUN", 95),
    Column("WAIT", 90),
    Column("OLDEST", 80),
    Column("TOK/S", 85),
    Column("TOKENS%", 75),
    Column("DEMAND%", 60),
    Column("REFUSED", 70),
    Column("TTFT50", 50),
    Column("TTFT95", 40),
    Column("TOKENS", 30),
)


def _tenants(model: Model) -> Iterator[Row]:
    recent = _by(model.recent(), lambda one: one.tenant)
    shares = tenant_shares(model)
    for tenant in model.tenants.values():
        yield _tenant(tenant, recent.get(tenant.name, ()), *shares[tenant.name])


def _tenant(tenant: Tenant, recent: Sequence[Ended], share: float, demand: float) -> Row:
    name = tenant_title(tenant)
    middle, high = percentiles(recent) or (0.0, 0.0)
    rate = tenant.tokens.rate(BUSY_SECONDS)

    def cells() -> tuple[Cell, ...]:
        return (
            plain(name), count(tenant.running), count(tenant.waiting),
            seconds(tenant.oldest) if tenant.waiting else "-", count(rate), percent(share), percent(demand),
            count(tenant.refused.total), _time(middle), _time(high), count(tenant.tokens.total),
        )  # fmt: skip

    keys = (
        name, tenant.running, tenant.waiting, tenant.oldest, rate, share, demand, tenant.refused.total, middle, high,
        tenant.tokens.total,
    )  # fmt: skip
    return Row(cells, keys, _tenant_mark(tenant, share))


def _tenant_mark(tenant: Tenant, share: float) -> Mark:
    if tenant.refused.growth(SHARE_SECONDS) > 0:
        return "warn"
    return "" if tenant.running or tenant.waiting or share else "dim"


_REQUESTS = (
    Column("REQUEST", 99),
    Column("STATE", 95, is_name=True),
    Column("WORKER", 60, is_name=True),
    Column("ADAPTER", 90, is_name=True),
    Column("TENANT", 70, is_name=True),
    Column("PROMPT", 65),
    Column("OUTPUT", 85),
    Column("TTFT", 80),
    Column("QUEUE", 50),
    Column("LOAD", 40),
    Column("PREFILL", 30),
    Column("DECODE", 35),
)


def _requests(model: Model) -> Iterator[Row]:
    for worker in model.workers:
        for row in worker.running:
            yield _running(model, worker, row)
    for one in islice(reversed(model.ended), _MAX_ENDED_SHOWN):
        yield _ended(one)


def _running(model: Model, worker: Worker, row: RunningRow) -> Row:
    name = model.adapter_name(row.adapter)
    adapter = BASE if name is None else name
    tenant = model.tenant_name(row.tenant) or NO_TENANT
    counts = row.prompt_tokens, row.output_tokens

    def cells() -> tuple[Cell, ...]:
        names = plain(worker.name), plain(adapter), plain(tenant)
        return str(row.request), "runs", *names, *map(count, counts), *("-",) * 5

    return Row(cells, (row.request, "runs", worker.name, adapter, tenant, *counts, *(0.0,) * 5))


def _ended(one: Ended) -> Row:
    row = one.row
    tenant = one.tenant or NO_TENANT
    times = one.ttft, row.queue, row.adapter_load, row.prefill, row.decode
    counts = row.prompt_tokens, row.output_tokens

    def cells() -> tuple[Cell, ...]:
        names = plain(one.worker) or "-", plain(one.adapter), plain(tenant)
        return str(row.request), plain(row.outcome), *names, *map(count, counts), *map(seconds, times)

    keys = row.request, row.outcome, one.worker, one.adapter, tenant, *counts, *times
    return Row(cells, keys, "dim" if row.output_tokens else "warn")


def _by(ended: Sequence[Ended], name: Callable[[Ended], str]) -> dict[str, list[Ended]]:
    found: dict[str, list[Ended]] = {}
    for one in ended:
        found.setdefault(name(one), []).append(one)
    return found


TABLES = (
    Table("workers", _WORKERS, _workers, 0),
    Table("adapters", _ADAPTERS, _adapters, 1),
    Table("tenants", _TENANTS, _tenants, 4),
    Table("requests", _REQUESTS, _requests, 0),
)
"""In the order of their keys, 1 to 4."""
