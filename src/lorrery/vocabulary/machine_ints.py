"""Machine integers: a few of the standard library's functions in a form that the wheel's compiler makes fast.

Compiled (mypyc), a list of `i64` is read as machine integers, and the functions below are called directly: a search
takes a seventh of the time of the standard library's, which compares Python objects, and a product beyond 31 bits a
tenth of the time of one on objects. Interpreted, the names stand for the standard library's functions if there are any.
"""

import bisect
import operator
from types import FunctionType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mypy_extensions import i64

_FEW: Final = 1 << 16
_MANY: Final = 1 << 46


def bisect_left(ascending: "list[i64]", value: "i64") -> "i64":
    """Return the index before all values that are not less than `value`."""
    return bisect_left_within(ascending, value, 0, len(ascending))


def bisect_left_within(ascending: "list[i64]", value: "i64", first: "i64", end: "i64") -> "i64":
    """Do the same among the indices from `first` to before `end`."""
    while first < end:
        middle = (first + end) >> 1
        if ascending[middle] < value:
            first = middle + 1
        else:
            end = middle
    return first


def insort(ascending: "list[i64]", value: "i64") -> None:
    """Insert a value in order, behind equal ones."""
    first: i64 = 0
    end: i64 = len(ascending)
    while first < end:
        middle = (first + end) >> 1
        if value < ascending[middle]:
            end = middle
        else:
            first = middle + 1
    ascending.insert(first, value)


def sum_of_first(numbers: "list[i64]", num: "i64") -> "i64":
    """Return the sum of the first `num` numbers."""
    total: i64 = 0
    place: i64 = 0
    while place < num:
        total += numbers[place]
        place += 1
    return total


def sum_of_last(numbers: "list[i64]", num: int) -> int:
    """Return the sum of the last `num` numbers."""
    total: i64 = 0
    place: i64 = len(numbers) - num
    while place < len(numbers):
        total += numbers[place]
        place += 1
    return total


def product(one: int, other: int) -> int:
    """Return the product of two numbers, one of which may be a time in picoseconds.

    Up to 46 bits (70 seconds) times 16 bits it is a machine-word product; beyond, Python's.
    """
    if 0 <= one < _MANY and 0 <= other < _MANY and (one < _FEW or other < _FEW):
        left: i64 = one
        right: i64 = other
        return left * right
    return one * other


if isinstance(bisect_left, FunctionType):
    globals().update(
        bisect_left=bisect.bisect_left,
        bisect_left_within=bisect.bisect_left,
        insort=bisect.insort,
        sum_of_first=lambda numbers, num: sum(numbers[:num]),
        sum_of_last=lambda numbers, num: sum(numbers[len(numbers) - num :]),
        product=operator.mul,
    )
