"""The tables: one row per worker, adapter, tenant or request, with sortable columns.

A column defines how its figure is shown, and when it is left out on a narrow terminal. Names are made safe for the
terminal: characters that could move its cursor, recolour or reorder text are escaped.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from lorrery.view.figures import BASE, NO_TENANT, Adapter, Ended, Tenant, Worker, percentiles
from lorrery.view.frame import RunningRow
from lorrery.view.model import SHARE_SECONDS, Model, Share

_MAX_ENDED_SHOWN = 500


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


def plain(text: str) -> str:
    r"""Return `text` with every character that is not printable as an escape: `\x1b`, `\n`, `\u202e`.

    That covers control characters, which a terminal obeys, marks that change the direction of writing, lone
    surrogates, which cannot be written, and blanks other than the space.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure with a text of its own.

    Attributes:
        key: to sort by.
        share: from 0 to 1, shown as a bar beside the text; None: no bar.
    """

    key: float
    text: str
    share: float | None = None


Value = float | str | Figure | None
"""What a row has in a column; None is shown as a dash, and sorts as 0 or as an empty name."""
Mark = Literal["", "bad", "warn", "dim"]


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Attributes:
        keep: priority; the column with the lowest is left out first, and the first column always stays.
        shown: formats its numbers.
        is_name: may be truncated; names sort from A to Z, figures from the largest.
    """

    heading: str
    keep: int
    shown: Callable[[float], str] = count
    is_name: bool = False

    def cell(self, value: Value) -> Figure | str:
        """Return what is shown of a value."""
        if isinstance(value, Figure):
            return value
        if value is None:
            return "-"
        return plain(value) if isinstance(value, str) else self.shown(value)

    def key(self, value: Value) -> float | str:
        """Return what a value is sorted by: a name in a column of names, otherwise a number."""
        if isinstance(value, Figure):
            return value.key
        return ("" if self.is_name else 0.0) if value is None else value


@dataclass(frozen=True, slots=True)
class Row:
    """One row: a value per column.

    Attributes:
        mark: "bad" or "warn" to highlight the row; "dim" if it is idle.
    """

    values: tuple[Value, ...]
    mark: Mark = ""

    def matches(self, text: str) -> bool:
        """Return whether a name in the row contains `text`, ignoring case."""
        return any(text in value.casefold() for value in self.values if isinstance(value, str))


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


_WORKERS = (
    Column("WORKER", 99, is_name=True),
    Column("DOES", 70, is_name=True),
    Column("BATCH", 90),
    Column("WAIT", 95),
    Column("OLDEST", 80, seconds),
    Column("KV", 85),
    Column("LORA", 60),
    Column("STEP", 40, seconds),
    Column("TOK/S", 75),
    Column("BUSY", 65, percent),
    Column("GPU", 10, is_name=True),
    Column("HOST", 5),
    Column("PREEMPT", 4),
)


def _workers(model: Model) -> Iterator[Row]:
    for worker in (*model.workers, *model.lost):
        yield _worker(model, worker)


def _worker(model: Model, worker: Worker) -> Row:
    state, running = worker.state, len(worker.running)
    does = "lost" if worker.lost_at is not None else "draining" if state.state == "draining" else state.kind
    loading = sum(resident.loaded_in > 0 for resident in worker.resident)
    loaded = len(worker.resident) - loading
    values = (
        f"{state.shard}/{worker.name}" if len(model.shards) > 1 else worker.name,
        does,
        Figure(running, count(running), running / max(model.widest_batch, 1)),
        worker.waiting,
        state.oldest if worker.waiting else None,
        Figure(worker.kv_ratio, percent(worker.kv_ratio), worker.kv_ratio),
        Figure(loaded + loading, f"{loaded}+{loading}" if loading else f"{loaded}"),
        state.step or None if running else None,
        worker.tokens_per_second,
        worker.busy_ratio,
        f"{state.tp} x {state.gpu}" if state.tp > 1 else state.gpu,
        state.host,
        state.preempted,
    )
    if worker.lost_at is not None:
        return Row(values, "bad")
    if state.state == "draining":
        return Row(values, "warn")
    return Row(values, "" if running or worker.waiting else "dim")


_ADAPTERS = (
    Column("ADAPTER", 99, is_name=True),
    Column("RUN", 95),
    Column("WAIT", 90),
    Column("GPUS", 80),
    Column("LOADING", 60),
    Column("LOADS", 70),
    Column("EVICT", 50),
    Column("THRASH", 75),
    Column("TTFT50", 65, seconds),
    Column("TTFT95", 40, seconds),
    Column("RANK", 10, str),
)


def _adapters(model: Model) -> Iterator[Row]:
    recent = _by(model.recent, lambda one: one.adapter)
    for adapter in model.adapters.values():
        if not adapter.is_gone:
            yield _adapter(adapter, recent.get(adapter.name, ()))


def _adapter(adapter: Adapter, recent: Sequence[Ended]) -> Row:
    middle, high = percentiles(recent) or (0.0, 0.0)
    thrash = adapter.recent_thrash
    values = (
        adapter.name,
        adapter.running,
        adapter.waiting,
        adapter.on_gpus,
        adapter.loading,
        adapter.loads.total,
        adapter.evictions.total,
        thrash,
        middle or None,
        high or None,
        adapter.rank or None,
    )
    return Row(values, "warn" if thrash else "" if adapter.running or adapter.waiting else "dim")


_TENANTS = (
    Column("TENANT", 99, is_name=True),
    Column("RUN", 95),
    Column("WAIT", 90),
    Column("OLDEST", 80, seconds),
    Column("TOK/S", 85),
    Column("TOKENS%", 75, percent),
    Column("DEMAND%", 60, percent),
    Column("REFUSED", 70),
    Column("TTFT50", 50, seconds),
    Column("TTFT95", 40, seconds),
    Column("TOKENS", 30),
)


def _tenants(model: Model) -> Iterator[Row]:
    recent = _by(model.recent, lambda one: one.tenant)
    shares = model.shares()
    for tenant in model.tenants.values():
        yield _tenant(tenant, recent.get(tenant.key, ()), shares[tenant.key])


def _tenant(tenant: Tenant, recent: Sequence[Ended], share: Share) -> Row:
    middle, high = percentiles(recent) or (0.0, 0.0)
    values = (
        tenant.name,
        tenant.running,
        tenant.waiting,
        tenant.oldest if tenant.waiting else None,
        tenant.tokens_per_second,
        share.tokens,
        share.demand,
        tenant.refused.total,
        middle or None,
        high or None,
        tenant.tokens.total,
    )
    if tenant.refused.growth(SHARE_SECONDS) > 0:
        return Row(values, "warn")
    return Row(values, "" if tenant.running or tenant.waiting or share.tokens else "dim")


_REQUESTS = (
    Column("REQUEST", 99, str),
    Column("STATE", 95, is_name=True),
    Column("WORKER", 60, is_name=True),
    Column("ADAPTER", 90, is_name=True),
    Column("TENANT", 70, is_name=True),
    Column("PROMPT", 65),
    Column("OUTPUT", 85),
    Column("TTFT", 80, seconds),
    Column("QUEUE", 50, seconds),
    Column("LOAD", 40, seconds),
    Column("PREFILL", 30, seconds),
    Column("DECODE", 35, seconds),
)


def _requests(model: Model) -> Iterator[Row]:
    for worker in model.workers:
        for row in worker.running:
            yield _running(model, worker, row)
    for one in islice(reversed(model.ended), _MAX_ENDED_SHOWN):
        yield _ended(one)


def _running(model: Model, worker: Worker, row: RunningRow) -> Row:
    adapter = model.adapter_name(row.adapter)
    names = worker.name, BASE if adapter is None else adapter, model.tenant_name(row.tenant) or NO_TENANT
    return Row((row.request, "runs", *names, row.prompt_tokens, row.output_tokens, None, None, None, None, None))


def _ended(one: Ended) -> Row:
    row = one.row
    names = one.worker or None, one.adapter, one.tenant or NO_TENANT
    times = one.ttft, row.queue, row.adapter_load, row.prefill, row.decode
    values = (row.request, row.outcome, *names, row.prompt_tokens, row.output_tokens, *times)
    return Row(values, "dim" if row.output_tokens else "warn")


def _by(ended: Iterable[Ended], name: Callable[[Ended], str]) -> dict[str, list[Ended]]:
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
