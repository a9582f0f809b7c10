"""What ran, from the summaries of runs: model, cluster, workload, settings; and where runs differ."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lorrery.view.reports.read import Run
from lorrery.view.reports.tables import cut

__all__ = ["differing", "facts", "headline", "options_of"]

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
