"""What `lorrery compare` compares: names of policies, ways to batch, placements and so on, or any settings.

    fcfs                            a name that a table of the core has, or a policy of your own, `module:Class`
    placement=adapter_hash          a setting; without a section it is one of `scheduler`
    vtc_fair,fair_by=tenant         several parts make one candidate

One name alone stands for it and all shipped ones of its kind; none for all shipped queue policies.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lorrery.scheduler.core.placements.table import PLACEMENTS
from lorrery.scheduler.core.policies import BATCHINGS, MEMORIES, PREFIX_CACHES, QUEUES
from lorrery.service.errors import SettingsError
from lorrery.service.names import cut
from lorrery.service.settings.reading import key_of

__all__ = ["Candidate", "candidates_of"]

_KINDS: Mapping[str, Mapping[str, object]] = {
    "scheduler.policy": QUEUES,
    "scheduler.batching": BATCHINGS,
    "scheduler.placement": PLACEMENTS,
    "scheduler.memory": MEMORIES,
    "scheduler.prefix_cache.kind": PREFIX_CACHES,
}
"""Setting -> names of it, in order of precedence: `none` is a memory rule."""
_NEEDS: Mapping[str, Sequence[str]] = {
    "scheduler.policy=fcfs_tail": ("scheduler.memory=estimated",),
    "scheduler.policy=lpm": ("scheduler.memory=estimated",),
    "scheduler.policy=cluster": ("scheduler.batch_num_adapters=4",),
}
"""Policies that the default settings do not allow -> what they need, unless it is set."""
_MOST = 40


@dataclass(frozen=True, slots=True)
class Candidate:
    """One candidate.

    Attributes:
        name: as given.
        overrides: its settings, as for `--set`.
        is_asked: whether the caller named it; others may be left out if they cannot be.
    """

    name: str
    overrides: tuple[str, ...]
    is_asked: bool = True


def candidates_of(names: Sequence[str], given: Sequence[str]) -> list[Candidate]:
    """Return the candidates that names stand for.

    Args:
        names: from the caller.
        given: overrides that all candidates have.

    Raises:
        SettingsError: a name that is not known, is given twice or sets what `given` sets, or too many.
    """
    fixed = {key_of(override) for override in given}
    found = [_candidate(name.strip(), fixed) for name in names]
    for place, one in enumerate(found):
        if one.overrides in [other.overrides for other in found[:place]]:
            raise SettingsError(f"{cut(one.name)} is given twice")
    if len(found) < 2:
        key = "scheduler.policy" if not found else key_of(found[0].overrides[0])
        others = _KINDS.get(key)
        if others is None or (found and len(found[0].overrides) > 1):
            raise SettingsError(f"{cut(found[0].name)} is one candidate; name another to compare it with")
        known = {one.overrides for one in found}
        usual = [replace(_candidate(name, fixed, key), is_asked=False) for name in others]
        found += [one for one in usual if one.overrides not in known]
    if len(found) > _MOST:
        raise SettingsError(f"{len(found)} candidates; {_MOST} are the most")
    return found


def _candidate(name: str, fixed: set[str], kind: str | None = None) -> Candidate:
    overrides: list[str] = []
    for part in re.split(r",(?=[A-Za-z][\w.]*=)", name):
        key, equals, value = part.partition("=")
        full = key if "." in key else f"scheduler.{key}"
        overrides.append(f"{full}={value}" if equals else f"{kind or _kind_of(part)}={part}")
    keys = {*map(key_of, overrides), *fixed}
    overrides += [need for need in _NEEDS.get(overrides[0], ()) if key_of(need) not in keys]
    for key in map(key_of, overrides):
        if key in fixed:
            raise SettingsError(f"--set {cut(key)} and the candidate {cut(name)} both say what {cut(key)} is; give one")
    return Candidate(name, tuple(overrides))


def _kind_of(name: str) -> str:
    if ":" in name:
        return "scheduler.policy"
    for kind, names in _KINDS.items():
        if name in names:
            return kind
    known = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in _KINDS.items())
    raise SettingsError(
        f"{cut(name)!r} is no candidate: expected a name, KEY=VALUE, or module:Class of a policy of your own ({known})"
    )
