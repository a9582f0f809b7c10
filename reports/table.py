"""Tables as the page's template shows them: sorted by a click on a heading, where there is a script."""

from dataclasses import dataclass, field

__all__ = ["Column", "Table", "cut"]

_LONGEST = 64
_TURNING = (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x2028, 0x2029)
_INVISIBLE = dict.fromkeys((*range(32), *range(127, 160), *_TURNING), " ")
"""Control characters, and those that turn the direction of text: a name with one could pass for another."""


@dataclass(frozen=True, slots=True)
class Column:
    """A heading. Numbers are set to the right, text to the left."""

    title: str
    unit: str = ""
    text: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells, as text.

    Attributes:
        last: a row that stays the last however the others are sorted, such as `other`.
    """

    title: str
    columns: list[Column]
    rows: list[list[str]]
    last: list[str] | None = None
    notes: list[str] = field(default_factory=list)


def cut(text: str, longest: int = _LONGEST) -> str:
    """Make a name or a message of a run fit for a line: one line, not too long, nothing invisible in it."""
    plain = text[: longest + 1].translate(_INVISIBLE)
    return plain if len(plain) <= longest else f"{plain[: longest - 3]}..."
