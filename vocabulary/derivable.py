"""Lets classes that the wheel compiles be derived from: those that plug-ins build upon.

A class that mypyc compiles refuses interpreted subclasses, unless it says, by the decorator `mypyc_attr`, that it may
have some; calls of its methods then look first whether one is overridden. mypyc knows the decorator by its name, so
nothing of mypyc's need be installed to run.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

__all__ = ["mypyc_attr"]

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr
else:
    T = TypeVar("T")

    def mypyc_attr(*, allow_interpreted_subclasses: bool) -> Callable[[type[T]], type[T]]:
        """Return a decorator that leaves a class as it is."""
        del allow_interpreted_subclasses
        return lambda cls: cls
