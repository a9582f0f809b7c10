"""Tables for the page's template: sorted by a click on a heading, if scripts are enabled."""

from dataclasses import dataclass, field

__all__ = ["Column", "Table", "cut"]

_LONGEST = 64
_TURNING = (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x2028, 0x2029)
_INVISIBLE = dict.fromkeys((*range(32), *range(127, 160), *_TURNING), " ")
"""Control characters, and those that change the direction of text: a name with one could pass for another."""


@dataclass(frozen=True, slots=True)
class Column:
    """A heading. Numbers are right-aligned, text left-aligned."""

    title: str
    unit: str = ""
    text: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells, as text.

    Attributes:
        last: a row that stays last in any order, such as `other`.
    """

    title: str
    columns: list[Column]
    rows: list[list[str]]
    last: list[str] | None = None
    notes: list[str] = field(default_factory=list)


def cut(text: str, longest: int = _LONGEST) -> str:
    """Shorten a run's name or message to one line without invisible characters."""
    plain = text[: longest + 1].translate(_INVISIBLE)
    return plain if len(plain) <= longest else f"{plain[: longest - 3]}..."
