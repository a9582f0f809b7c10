"""The range of a fitted model's rows, and the queries beyond it, where the model extrapolates."""

from collections.abc import Iterable


class Extent:
    """The range of one quantity.

    Args:
        what: its name, in the plural.
        low: the least of the rows.
        high: the largest of the rows.
    """

    __slots__ = ("_high", "_least", "_low", "_most", "_what")

    def __init__(self, what: str, low: int, high: int) -> None:
        self._what, self._low, self._high = what, low, high
        self._least, self._most = low, high

    def see(self, value: int) -> None:
        """Record a queried value."""
        if value > self._most:
            self._most = value
        elif value < self._least:
            self._least = value

    def forget(self) -> None:
        """Reset the record of queries."""
        self._least, self._most = self._low, self._high

    @property
    def beyond(self) -> str:
        """Queries outside the rows, in words; empty if there were none."""
        found = [f"down to {self._least:,}"] if self._least < self._low else []
        if self._most > self._high:
            found.append(f"up to {self._most:,}")
        measured = f"{self._low:,}" if self._low == self._high else f"{self._low:,} to {self._high:,}"
        return f"{' and '.join(found)} {self._what} (measured: {measured})" if found else ""


def beyond(extents: Iterable[Extent]) -> str:
    """Describe the queries outside the rows of several extents; empty if there were none."""
    found = [extent.beyond for extent in extents]
    return ", ".join(text for text in found if text)
