"""What somebody may have meant by a setting that there is not."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

_MOST_CHARACTERS = 100
"""Longer names are no slip of the finger, and are compared slowly."""


def nearest_setting(key: Sequence[str], known: Iterable[Sequence[str]]) -> str | None:
    """Return the setting, or the section, that is most like one that is not known; None if none is.

    That is a name much like it in its own section, else the same name in another section.

    Args:
        key: its names, the outer ones first.
        known: the settings, likewise.
    """
    *outer, last = key
    if len(last) > _MOST_CHARACTERS:
        return None
    keys = list(known)
    beside = {one[len(outer)]: None for one in keys if len(one) > len(outer) and list(one[: len(outer)]) == outer}
    if near := get_close_matches(last, beside, n=1):
        return ".".join((*outer, near[0]))
    return next((".".join(one) for one in keys if one[-1] == last), None)
