"""The kinds of worker of a cluster, since a plan is for workers that are alike.

Each group of `[[workers]]` is a kind, unless its workers equal those of another group; without groups there is one.
With `worker.group`, only that group counts.
"""

from collections.abc import Mapping

from lorrery.service.errors import SettingsError
from lorrery.service.settings.cluster import Settings, changed
from lorrery.service.settings.reading import leaves
from lorrery.worker.build import read_catalogue
from lorrery.worker.device.errors import CatalogueError

__all__ = ["all_alike", "by_name", "each_alike", "only_kind"]

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
