"""The interface of a kind of golden record: how to detect it, and how to replay it on the shipped code."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeGuard

Record: TypeAlias = Mapping[str, Any]
"""One line of a golden file, parsed from JSON."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One value that differs from the record's.

    Attributes:
        where: the value's place in the record, e.g. `round 2, admitted`.
        expected: the record's value.
        got: the shipped code's value.
    """

    where: str
    expected: object
    got: object


@dataclass(frozen=True, slots=True)
class Skip:
    """The record cannot be replayed, because the part that it covers does not exist yet."""

    reason: str


class Kind(Protocol):
    """One kind of golden record."""

    @property
    def name(self) -> str:
        """Name of the kind in reports: the stem of the file in which its records are published."""
        ...

    def detect(self, record: Record) -> bool:
        """Return whether the record is of this kind, judged by its fields alone; true for at most one kind."""
        ...

    def replay(self, record: Record) -> list[Mismatch] | Skip:
        """Run the record through the shipped code.

        Returns:
            Every difference found, in the record's order; empty if there is none.

        Raises:
            Exception: the record is malformed, or the shipped code fails on it; both count as a failed record.
        """
        ...


def compare(where: str, expected: object, got: object) -> list[Mismatch]:
    """Compare two values exactly; for two lists, name the first difference.

    Types must match too where JSON distinguishes them: `true` is not 1. Integers and floats are one type.
    """
    if _is_list(expected) and _is_list(got):
        for index, (one, other) in enumerate(zip(expected, got, strict=False)):
            if not _same(one, other):
                return [Mismatch(f"{where}[{index}]", one, other)]
        if len(expected) != len(got):
            return [Mismatch(f"length of {where}", len(expected), len(got))]
        return []
    return [] if _same(expected, got) else [Mismatch(where, expected, got)]


def compare_close(where: str, expected: float, got: float, relative: float) -> list[Mismatch]:
    """Compare two numbers with a tolerance relative (0 <= relative < 1) to the expected one."""
    return [] if abs(got - expected) <= relative * abs(expected) else [Mismatch(where, expected, got)]


def _same(expected: object, got: object) -> bool:
    if _is_list(expected) and _is_list(got):
        return len(expected) == len(got) and all(_same(one, other) for one, other in zip(expected, got, strict=True))
    if isinstance(expected, bool) is not isinstance(got, bool):
        return False
    return bool(expected == got)


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
