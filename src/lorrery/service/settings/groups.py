"""Groups of `[[workers]]`: their effective settings, invalid groups, and settings that every group overrides.

A process of a group (`worker.group`) has the group's values in `[worker]` and `[autoscaler]`. The other groups cannot
be validated against these, and need not be; they are validated where `worker.group` is unset.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from lorrery.service.settings import reading as reading
from lorrery.service.settings.autoscaler import AutoscalerSettings
from lorrery.worker.settings import OF_PROCESS, WorkerGroup, WorkerSettings, of_group

__all__ = ["check_groups", "rule_of", "set_in_vain", "with_its_group"]

_OF_ALL = ("ttft_seconds", "tpot_seconds")
"""The service level, which a report has for all groups together."""


def with_its_group(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a settings file's tables with the values of the group that `worker.group` names, if any.

    Raises:
        ValueError: there is no such group, or it has a key that a group cannot set.
    """
    worker = content.get("worker")
    if isinstance(worker, WorkerSettings):
        worker = worker.model_dump(exclude_unset=True)
    number = worker.get("group") if isinstance(worker, dict) else None
    if isinstance(number, str) and number.isdecimal():  # from the environment
        number = int(number)
    if not isinstance(worker, dict) or not isinstance(number, int):
        return content
    groups = TypeAdapter(tuple[WorkerGroup, ...]).validate_python(content.get("workers") or ())
    if not 0 <= number < len(groups):
        raise ValueError(f"worker.group is {number}; [[workers]] has {len(groups)} groups, counted from 0")
    found = {**content, "worker": of_group(worker, groups[number].overrides)}
    if groups[number].autoscaler:
        autoscaler = content.get("autoscaler") or {}
        if isinstance(autoscaler, AutoscalerSettings):
            autoscaler = autoscaler.model_dump(exclude_unset=True)
        found["autoscaler"] = {**autoscaler, **groups[number].autoscaler}
    return found


def rule_of(group: WorkerGroup, autoscaler: AutoscalerSettings) -> AutoscalerSettings:
    """Return the autoscaler settings of a group, given `[autoscaler]`."""
    return AutoscalerSettings.model_validate({**autoscaler.model_dump(exclude_unset=True), **group.autoscaler})


def check_groups(groups: Sequence[WorkerGroup], worker: WorkerSettings, autoscaler: AutoscalerSettings) -> None:
    """Validate groups.

    Args:
        groups: in order.
        worker: `[worker]`, of no group.
        autoscaler: `[autoscaler]`, of no group.

    Raises:
        ValueError: names the first invalid group, and its key.
    """
    own = worker.model_dump(exclude_unset=True)
    for number, group in enumerate(groups):
        here = ("workers", str(number))
        try:
            WorkerSettings.model_validate(of_group(own, group.overrides))
        except ValidationError as error:
            raise ValueError(reading.in_words(error, _known(here), here)) from None
        except ValueError as error:
            raise ValueError(f"workers.{number}.{error}") from None
        where = f"workers.{number}.autoscaler"
        try:
            rule = rule_of(group, autoscaler)
        except ValidationError as error:
            raise ValueError(reading.in_words(error, _known(here), (*here, "autoscaler"))) from None
        if key := next((key for key in _OF_ALL if key in group.autoscaler), None):
            raise ValueError(f"{where}.{key}: the service level is that of all workers; set it in [autoscaler]")
        if rule.enabled and not rule.min_replicas and len(groups) > 1:
            raise ValueError(
                f"{where}.min_replicas is 0; with {len(groups)} groups it must be at least 1, as nothing would bring"
                " this group back: no request waits for it while another group serves: set it to 1"
            )


def _known(group: reading.Key) -> list[reading.Key]:
    """Return the settings that a group may have; `group`: its own key."""
    of_gpu = [key for key in reading.known_settings(WorkerSettings) if key[0] not in OF_PROCESS]
    own = [("autoscaler", *key) for key in reading.known_settings(AutoscalerSettings) if key[0] not in _OF_ALL]
    return [(*group, *key) for key in (("count",), *of_gpu, *own)]


def set_in_vain(layers: Sequence[Mapping[str, Any]]) -> str | None:
    """Return which setting of `[worker]` or `[autoscaler]` has no effect because every group overrides it; None: none.

    Args:
        layers: tables of the sources, in ascending precedence; only layers after the first are checked.
    """
    groups: object = ()
    for number, layer in enumerate(layers):
        groups = layer.get("workers", groups)
        if not number or not isinstance(groups, list | tuple) or not groups:
            continue
        known = [group for group in groups if isinstance(group, Mapping)]
        if len(known) != len(groups):
            continue
        worker, rule = layer.get("worker"), layer.get("autoscaler")
        if isinstance(worker, Mapping):
            own = [dict(reading.leaves(group)) for group in known]
            if why := _in_vain("worker", dict(reading.leaves(worker)), own):
                return why
        # A group's metrics replace all others, so rules are compared by their top-level keys.
        rules = [_by_key(own) for group in known if isinstance(own := group.get("autoscaler", {}), Mapping)]
        given = _by_key(rule) if isinstance(rule, Mapping) and len(rules) == len(known) else {}
        if why := _in_vain("autoscaler", given, rules):
            return why
    return None


def _by_key(table: Mapping[str, Any]) -> dict[reading.Key, object]:
    return {(name,): value for name, value in table.items()}


def _in_vain(
    section: str, given: Mapping[reading.Key, object], groups: Sequence[Mapping[reading.Key, object]]
) -> str | None:
    for key, value in given.items():
        if not all(key in group for group in groups):
            continue
        have = [group[key] == value for group in groups]
        if all(have) or (key == ("enabled",) and any(have)):  # --autoscale is for files with fixed groups, too
            continue
        name, what = ".".join(key), "that changes nothing" if any(have) else "no worker has it"
        return (
            f"{section}.{name} is {value!r}, and {what}: every group of [[workers]] sets {name} itself; set it there,"
            " or have no groups (--set 'workers=[]')"
        )
    return None
