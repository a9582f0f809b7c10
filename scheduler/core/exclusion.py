"""Settings that a row of the policy tables cannot be combined with, and why."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

SET = "(set)"


@dataclass(frozen=True, slots=True)
class NotIn:
    """All values but these."""

    values: frozenset[object]


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Settings that a row cannot be combined with.

    Attributes:
        settings: excluded values by setting, which must all match at once; `None` stands for "unset", `SET` for
            "anything but unset or empty", `NotIn` for all others. A setting that is not among the chosen ones matches
            nothing.
        why: the reason, and what to do instead.
    """

    settings: Mapping[str, Collection[object] | NotIn]
    why: str

    def applies(self, chosen: Mapping[str, object]) -> bool:
        """Return whether the chosen settings match this exclusion."""
        return all(name in chosen and is_among(chosen[name], values) for name, values in self.settings.items())


def is_among(value: object, values: Collection[object] | NotIn) -> bool:
    """Return whether a value is one of `values`; see `Exclusion.settings`."""
    if isinstance(values, NotIn):
        return value not in values.values
    if SET in values and value is not None and value != () and value != {}:
        return True
    return any(value == one for one in values)
