"""Whole numbers in ascending order: the standard library's `bisect`, as fast for the compiler of the wheel.

Compiled (mypyc), a list of `i64` is read as machine integers, and what is below is called directly: a search takes a
seventh of what a call of the standard library's does, which compares Python's objects. Interpreted, the names stand for
the standard library's functions.
"""

import bisect
from types import FunctionType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mypy_extensions import i64


def bisect_left(ascending: "list[i64]", value: "i64") -> "i64":
    """Return the place before all that are not less than a value."""
    first: i64 = 0
    end: i64 = len(ascending)
    while first < end:
        middle = (first + end) >> 1
        if ascending[middle] < value:
            first = middle + 1
        else:
            end = middle
    return first


def insort(ascending: "list[i64]", value: "i64") -> None:
    """Put a value in its place, behind those that equal it."""
    first: i64 = 0
    end: i64 = len(ascending)
    while first < end:
        middle = (first + end) >> 1
        if value < ascending[middle]:
            end = middle
        else:
            first = middle + 1
    ascending.insert(first, value)


if isinstance(bisect_left, FunctionType):
    globals().update(bisect_left=bisect.bisect_left, insort=bisect.insort)
