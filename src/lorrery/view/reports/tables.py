"""Tables for the page's template, sorted by a click on a heading if scripts are enabled; those of runs; what ran.

The figures of runs are exact, over all requests. What ran, from the summaries of runs: model, cluster, workload,
settings; and where runs differ.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lorrery.view.reports import figures
from lorrery.view.reports.chart import number, seconds
from lorrery.view.reports.read import Run
from lorrery.view.reports.requests import Requests
from lorrery.vocabulary.adapters import FIGURES

__all__ = [
    "Column",
    "Table",
    "cut",
    "differing",
    "facts",
    "failure_table",
    "group_tables",
    "headline",
    "latency_table",
    "options_of",
    "tiles",
]

Floats = npt.NDArray[np.float64]

_FROM_INTENDED = "from the intended send"
_MOST_GROUPS = 50
_MOST_FAILURES = 30
BASE_MODEL, NO_TENANT = "(base model)", "(none)"
_LEVELS = (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99), ("p99.9", 0.999), ("max", 1.0))
_LONGEST = 64
_TURNING = (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x2028, 0x2029)
_INVISIBLE = dict.fromkeys((*range(32), *range(127, 160), *_TURNING), " ")
"""Control characters, and those that change the direction of text: a name with one could pass for another."""


@dataclass(frozen=True, slots=True)
class Column:
    """A heading. Numbers are right-aligned, text left-aligned."""

    title: str
    unit: str = ""
    text: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells, as text.

    Attributes:
        last: a row that stays last in any order, such as `other`.
    """

    title: str
    columns: list[Column]
    rows: list[list[str]]
    last: list[str] | None = None
    notes: list[str] = field(default_factory=list)


def cut(text: str, longest: int = _LONGEST) -> str:
    """Shorten a run's name or message to one line without invisible characters."""
    plain = text[: longest + 1].translate(_INVISIBLE)
    return plain if len(plain) <= longest else f"{plain[: longest - 3]}..."


def tiles(run: Run) -> list[tuple[str, str, str]]:
    """Return the main figures of one run: name, value, and additional text."""
    requests = run.requests
    num_failed, num_ok = int(requests.failed.sum()), int(requests.ok.sum())
    cut_off = len(requests) - num_failed - num_ok
    tokens = float(np.nansum(requests["output_tokens"][requests.completed]))
    prompts = float(np.nansum(requests["prompt_tokens"][requests.completed]))
    span = requests.duration
    found = [
        ("requests", f"{len(requests):,}", f"{num_ok:,} completed{f', {cut_off:,} cut off' if cut_off else ''}"),
        ("failed", f"{num_failed:,}", _share(num_failed, len(requests))),
        ("output tokens/s", number(tokens / span) if span else "-", f"{number(prompts / span) if span else '-'} in"),
    ]
    for name, values in (("TTFT", requests.ttft), ("TPOT", requests.tpot), ("E2E", requests.e2e)):
        p50, p99 = figures.quantiles(values, 0.5, 0.99)
        found.append((f"{name} p50", seconds(p50), f"p99 {seconds(p99)}"))
    return found


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.2%} of all" if whole else ""


def latency_table(runs: Sequence[Run]) -> Table:
    """Return the table of exact figures of each distribution."""
    several = len(runs) > 1
    columns = [
        Column("", text=True),
        *([Column("run", text=True)] if several else []),
        Column("requests"),
        Column("mean"),
    ]
    columns += [Column(name) for name, _ in _LEVELS]
    rows = []
    delayed = any(_is_delayed(run.requests) for run in runs)
    for name, values_of in _distributions(with_sent=delayed).items():
        for run in runs:
            values = values_of(run.requests)
            finite = values[np.isfinite(values)]
            mean = float(finite.mean()) if len(finite) else math.nan
            cells = [seconds(mean), *map(seconds, figures.quantiles(finite, *(level for _, level in _LEVELS)))]
            rows.append([name, *([run.name] if several else []), f"{len(finite):,}", *cells])
    return Table("Latency", columns, rows)


def _is_delayed(requests: Requests) -> bool:
    delays = requests["sent_seconds"] - requests["intended_seconds"]
    return bool((delays[np.isfinite(delays)] > 1e-6).any())


def _distributions(*, with_sent: bool) -> dict[str, Callable[[Requests], Floats]]:
    found: dict[str, Callable[[Requests], Floats]] = {f"TTFT {_FROM_INTENDED}": lambda one: one.ttft}
    if with_sent:
        found["TTFT from the actual send"] = lambda one: one.ttft - (one["sent_seconds"] - one["intended_seconds"])
    found["TPOT (E2E - TTFT) / (n - 1)"] = lambda one: one.tpot
    found[f"E2E {_FROM_INTENDED}"] = lambda one: one.e2e
    if with_sent:
        found["E2E from the actual send"] = lambda one: one.e2e - (one["sent_seconds"] - one["intended_seconds"])
    found["queue, to admission"] = lambda one: np.where(one.completed, one["queue_seconds"], np.nan)
    return found


def group_tables(run: Run, num_runs: int) -> list[Table]:
    """Return tables by adapter, tenant and worker, where there are several."""
    requests = run.requests
    most = _MOST_GROUPS if num_runs == 1 else max(10, _MOST_GROUPS // num_runs)
    found = []
    for title, column, unnamed in (
        ("Adapter", "adapter_id", BASE_MODEL),
        ("Tenant", "tenant_id", NO_TENANT),
        ("Worker", "worker_id", NO_TENANT),
    ):
        names = requests.names[column]
        if not len(requests) or not any(names) or (len(names) == 1 and column == "worker_id"):
            continue
        groups = figures.groups(requests, column, most)
        cached = any(group.cached_tokens for group in groups)
        queued = any(math.isfinite(group.queue) for group in groups)
        loaded = any(group.load > 0 for group in groups)
        columns = [Column(title.lower(), text=True), Column("requests"), Column("failed"), Column("output tokens")]
        columns += [Column("cached", unit="% of prompts")] if cached else []
        columns += [Column("queue", unit="mean ms")] if queued else []
        columns += [Column("adapter load", unit="mean ms")] if loaded else []
        columns += [
            Column(name, unit="ms") for name in ("TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "E2E p50", "E2E p99")
        ]
        rows = []
        for group in groups:
            cells = [
                cut(group.name or unnamed),
                f"{group.num_requests:,}",
                f"{group.num_failed:,}",
                f"{group.output_tokens:,}",
            ]
            cells += [_ratio(group.cached_tokens, group.prompt_tokens)] if cached else []
            cells += [_ms(group.queue)] if queued else []
            cells += [_ms(group.load)] if loaded else []
            cells += [_ms(one) for pair in (group.ttft, group.tpot, group.e2e) for one in pair]
            rows.append(cells)
        is_cut = len(names) > most
        note = [f"the {most} with most requests, and the other {len(names) - most:,} together"] if is_cut else []
        found.append(
            Table(f"By {title.lower()}", columns, rows[:-1] if is_cut else rows, rows[-1] if is_cut else None, note)
        )
    loads = _loads_table(run, most)
    return found if loads is None else [*found, loads]


def _loads_table(run: Run, most: int) -> Table | None:
    """Return the table of the adapters' loads, evictions and time on GPUs; None without any."""
    given = run.part("adapter_loads").get("adapters")
    adapters = [one for one in given if isinstance(one, Mapping)] if isinstance(given, list) else []
    if not adapters:
        return None
    shown = [(str(one.get("adapter_id")), [_figure(one.get(name)) for name in FIGURES]) for one in adapters]
    shown.sort(key=lambda entry: (-entry[1][0], entry[0]))
    columns = [Column("adapter", text=True), Column("loads"), Column("failed")]
    columns += [Column("thrash"), Column("evictions")]
    columns += [Column("from host", unit="ms"), Column("from disk", unit="ms"), Column("on GPUs", unit="s")]

    def cells(name: str, values: Sequence[float]) -> list[str]:
        host, disk, resident = values[4:]
        return [cut(name), *(f"{value:,.0f}" for value in values[:4]), _ms(host), _ms(disk), number(resident)]

    rest = [values for _, values in shown[most:]]
    notes = ["thrash: loads that began within a minute after the same GPU had evicted the adapter; all GPUs together"]
    if rest:
        notes.append(f"the {most} with most loads, and the other {len(rest):,} together")
    return Table(
        "Loads of adapters",
        columns,
        [cells(name, values) for name, values in shown[:most]],
        cells("other", [sum(column) for column in zip(*rest, strict=True)]) if rest else None,
        notes,
    )


def _figure(value: object) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def _ms(value: float) -> str:
    return number(value * 1e3)


def _ratio(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}" if whole else "-"


def failure_table(run: Run) -> Table | None:
    """Return the table of failures and their reasons; None if nothing failed."""
    found = figures.failures(run.requests)
    if not found:
        return None
    columns = [Column("status", text=True), Column("reason", text=True), Column("requests"), Column("before a token")]
    columns += [Column("first", unit="at s"), Column("last", unit="at s"), Column("most of", text=True)]
    rows = []
    for one in found[:_MOST_FAILURES]:
        adapter, tenant = one.most
        most = f"{cut(adapter or BASE_MODEL, 40)}{f', tenant {cut(tenant, 40)}' if tenant else ''}"
        rows.append([
            cut(one.status), cut(one.reason or "no message", 400), f"{one.count:,}", f"{one.num_before_token:,}",
            number(one.first_seconds), number(one.last_seconds), most,
        ])  # fmt: skip
    notes = [f"the {_MOST_FAILURES} most frequent of {len(found):,} reasons"] if len(found) > _MOST_FAILURES else []
    return Table("", columns, rows, notes=notes)


_UNTOLD = "not told"
_ADDRESSES = ("listen", "metrics", "name", "endpoint")
"""Of services that a simulation does not have."""


def facts(run: Run) -> list[tuple[str, str]]:
    """Describe what ran, one line per topic."""
    options, cluster, workload = run.part("options"), run.part("cluster"), run.part("workload")
    settings = run.part("settings")
    worker, scheduler = (_mapping(settings.get(name)) for name in ("worker", "scheduler"))
    found = [("model", _plain(cluster.get("model")) or _UNTOLD), ("cluster", _cluster(cluster, worker))]
    if run.is_simulated:
        found.append(("how", "simulated, under a virtual clock"))
    elif run.summary:
        where = f"{options.get('target') or _UNTOLD}, by {options.get('protocol', 'grpc')}"
        found.append(("how", f"live, at {where}"))
    found.append(("workload", _workload(options, workload)))
    if scheduler:
        names = ("policy", "batching", "memory", "placement")
        found.append(("scheduling", ", ".join(f"{name} {_plain(scheduler.get(name)) or 'default'}" for name in names)))
    events = run.part("simulation").get("events")
    if isinstance(events, list) and events:
        found.append(("faults", cut("; ".join(map(str, events)), 300)))
    scale = cluster.get("time_scale")
    seconds = f"{run.requests.duration:,.1f} s from the first send to the last end"
    found.append(
        (
            "duration",
            f"{seconds}, device time at {scale:g} wall seconds"
            if isinstance(scale, int | float) and scale != 1
            else seconds,
        )
    )
    if workload.get("attribution"):
        found.append(("trace", _plain(workload.get("attribution"))))
    if run.summary:
        when, version = (_plain(run.summary.get(name)) or _UNTOLD for name in ("started_at", "lorrery_version"))
        found.append(("made", f"{when}, lorrery {version}"))
    found.append(("files", str(run.folder)))
    return [(name, cut(text, 400)) for name, text in found]


def headline(run: Run) -> str:
    """Describe what ran in one line."""
    cluster, options = run.part("cluster"), run.part("options")
    if not run.summary:
        return ""
    workers = _cluster(cluster, _mapping(run.part("settings").get("worker")))
    how = "simulated" if run.is_simulated else "live"
    return cut(
        f"{_plain(cluster.get('model')) or 'model unknown'} on {workers}, {_plain(options.get('workload'))}, {how}", 200
    )


def _cluster(cluster: Mapping[str, Any], worker: Mapping[str, Any]) -> str:
    workers = cluster.get("workers")
    if not isinstance(workers, list):
        return f"workers {_UNTOLD}"
    degree = worker.get("tensor_parallel", 1)
    told = any("(TP " in str(one) for one in workers)
    of_each = f" of {degree} GPUs each" if isinstance(degree, int) and degree > 1 and not told else ""
    pairs = [one for one in workers if isinstance(one, list) and len(one) == 2]
    text = ", ".join(f"{count} x {gpu}{of_each}" for gpu, count in pairs) or "no worker"
    shards = cluster.get("num_shards")
    return f"{text}, {shards} schedulers" if isinstance(shards, int) and shards > 1 else text


def _workload(options: Mapping[str, Any], workload: Mapping[str, Any]) -> str:
    notes = workload.get("notes")
    told = [str(one) for one in notes] if isinstance(notes, list) else []
    name = _plain(options.get("workload")) or _UNTOLD
    clients = options.get("concurrency")
    closed = [f"{clients} clients, one request after another"] if clients else []
    return "; ".join([name, *closed, *told, *([f"seed {options['seed']}"] if "seed" in options else [])])


def options_of(run: Run) -> dict[str, str]:
    """Flatten options, cluster, faults and settings, such as `scheduler.policy`; without empty ones."""
    found = dict(_flat("", run.part("options")))
    cluster = dict(run.part("cluster"))
    if "workers" in cluster:
        cluster["workers"] = _cluster({"workers": cluster["workers"]}, {})
    found |= {f"cluster.{key}": value for key, value in _flat("", cluster)}
    events = run.part("simulation").get("events")
    found["faults"] = "; ".join(map(str, events)) if isinstance(events, list) else ""
    kept = (entry for entry in _flat("", run.part("settings")) if entry[0].rpartition(".")[2] not in _ADDRESSES)
    return {key: value for key, value in (found | dict(kept)).items() if value}


def differing(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return the options that differ between runs; a missing option counts as different."""
    options = [options_of(run) for run in runs]
    keys = dict.fromkeys(key for one in options for key in one)
    different = [(key, [one.get(key, "") for one in options]) for key in keys]
    return [(key, [cut(value, 80) for value in values]) for key, values in different if len(set(values)) > 1]


def _flat(prefix: str, value: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, part in value.items():
        if isinstance(part, Mapping) and part:
            yield from _flat(f"{prefix}{key}.", part)
        else:
            yield f"{prefix}{key}", _plain(part)


def _plain(value: object) -> str:
    if value is None or value in ([], {}):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
