"""The header of a CSV file."""

from collections.abc import Sequence


def repeated(columns: Sequence[str]) -> str:
    """Return the columns that stand more than once in a header, in its order, for an error; empty: none."""
    return ", ".join(name for name in dict.fromkeys(columns) if columns.count(name) > 1)
