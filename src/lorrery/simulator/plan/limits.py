"""What a plan leaves out, and why: refused requests, streams beyond settings or memory, and notes on slow kernels.

A plan is for workers that are alike. Each group of `[[workers]]` is a kind, unless its workers equal those of another
group; without groups there is one. With `worker.group`, only that group counts.
"""

from collections.abc import Mapping, Sequence

from lorrery.service.errors import SettingsError
from lorrery.service.settings.cluster import Settings, changed
from lorrery.service.settings.reading import leaves
from lorrery.worker.build import read_catalogue
from lorrery.worker.device.capacity import Capacity, Workload
from lorrery.worker.device.catalogue.hardware import CatalogueError

Changes = Mapping[str, object]
"""Setting -> value, as `changed` takes them; all values can be written as TOML."""


def all_alike(settings: Settings) -> Changes:
    """Return the changes that leave no groups, so that all workers are as in `[worker]`."""
    return {"workers": []} if settings.worker.group is None else {"workers": [], "worker.group": ""}


def each_alike(settings: Settings) -> list[Changes]:
    """Return for each group the changes after which all workers have its GPU; no changes if there are no groups."""
    groups, own = settings.workers, settings.worker.group
    found: list[Changes] = []
    for group in groups if own is None else groups[own : own + 1]:
        of_gpu = {key: value for key, value in group.overrides.items() if key != "gpus"}
        found.append({**all_alike(settings), **{".".join(key): value for key, value in leaves({"worker": of_gpu})}})
    return found or [{}]


def by_name(settings: Settings) -> Settings:
    """Return settings that name GPU and model as the catalogue does, and not by an alias."""
    catalogue = read_catalogue(settings.catalogue)
    try:
        gpu, model = catalogue.gpu(settings.worker.gpu), catalogue.model(settings.model)
    except CatalogueError:
        return settings  # the plan reports it
    return changed(settings, {"worker.gpu": gpu.name, "model": model.name})


def only_kind(settings: Settings) -> Settings:
    """Return settings without groups, in which all workers are of the cluster's one kind.

    Raises:
        SettingsError: the groups are of several kinds.
    """
    kinds: dict[int, Settings] = {}
    for group, changes in enumerate(each_alike(settings)):
        kind = changed(settings, changes) if changes else settings
        if by_name(kind) not in map(by_name, kinds.values()):
            kinds[group] = kind
    if len(kinds) > 1:
        names = (f"{kind.worker.tensor_parallel} x {kind.worker.gpu} in group {group}" for group, kind in kinds.items())
        raise SettingsError(
            f"[[workers]] has {len(kinds)} kinds of worker ({', '.join(names)}), and a plan is for one: name its group,"
            " as with overrides={'worker.group': 0}"
        )
    return next(iter(kinds.values()))


_NEARLY = 0.9
"""Share of the front end's requests from which a plan says so."""

__all__ = ["bound_of", "notes_on", "why_too_long"]


def why_too_long(settings: Settings, work: Workload) -> str | None:
    """Return why a cluster refuses such requests; None if it accepts them."""
    own, prompt, output = settings.scheduler, work.prompt[1], work.output[1]
    if prompt > own.max_req_input_len:
        return (
            f"prompts of {prompt} tokens are refused; scheduler.max_req_input_len is {own.max_req_input_len}"
            " (--set scheduler.max_req_input_len=N)"
        )
    if prompt + output > own.max_req_total_len:
        return (
            f"requests of {prompt} + {output} tokens are refused; scheduler.max_req_total_len is"
            f" {own.max_req_total_len} (--set scheduler.max_req_total_len=N)"
        )
    return None


def bound_of(capacity: Capacity, streams: int, *, own_limit: bool) -> str | None:
    """Return what limits the computed streams to this number; None if more can be computed.

    Args:
        capacity: of a replica.
        streams: at once.
        own_limit: whether the caller gave the limit on running streams.
    """
    if streams == capacity.fitting_streams:
        return "KV space"
    if streams == capacity.running_streams:
        return "--max-concurrency" if own_limit else "the settings' limit on sequences"
    return None


def notes_on(capacity: Capacity, left_out: Sequence[int], requests: float, *, own_limit: bool) -> list[str]:
    """Return notes on what is left out, and on slow kernels.

    Args:
        capacity: of a replica.
        left_out: requested concurrencies above what can run.
        requests: per second with all streams.
        own_limit: as for `bound_of`.
    """
    notes, most = list[str](), capacity.running_streams
    notes += capacity.slow_kernels
    engine = capacity.deployment.engine
    if capacity.of_kernels and engine.most_sequences is not None and most > engine.most_sequences:
        notes.append(
            f"the host times of {engine.name} were found with up to {engine.most_sequences} sequences in a step; with"
            " more they are extrapolated (docs/validation.md)"
        )
    front_end = capacity.front_end_requests
    if requests > _NEARLY * front_end:
        servers = capacity.deployment.front_end.servers
        notes.append(
            f"the engine's front end takes at most {front_end:,.0f} requests/s of {capacity.workload.prompt_tokens}"
            f" prompt tokens, whatever the GPU does: more come with worker.api_server_count, now {servers}, or replicas"
        )
    if left_out:
        bound = bound_of(capacity, most, own_limit=own_limit)
        notes.append(f"left out: {', '.join(map(str, left_out))} streams; {_streams(most)} at most, by {bound}")
    return notes


def _streams(number: int) -> str:
    return f"{number} stream{'' if number == 1 else 's'}"
