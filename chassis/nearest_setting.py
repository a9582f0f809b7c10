"""Suggests the setting that an unknown key may have meant."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

_MOST_CHARACTERS = 100
"""A longer key is no typing error, and comparing it is slow."""


def nearest_setting(key: Sequence[str], known: Iterable[Sequence[str]]) -> str | None:
    """Return the setting or section closest to an unknown one; None: no match.

    A similar name in the same section is preferred over the same name in another section.

    Args:
        key: the unknown key, outer names first.
        known: the existing settings, likewise.
    """
    *outer, last = key
    if len(last) > _MOST_CHARACTERS:
        return None
    keys = list(known)
    beside = {one[len(outer)]: None for one in keys if len(one) > len(outer) and list(one[: len(outer)]) == outer}
    if near := get_close_matches(last, beside, n=1):
        return ".".join((*outer, near[0]))
    return next((".".join(one) for one in keys if one[-1] == last), None)
