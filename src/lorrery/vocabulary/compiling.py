"""Options for the compiler of the wheel, by the class decorator `mypyc_attr`, which has no effect when interpreted.

* `allow_interpreted_subclasses=True`: plug-ins subclass it. A class that mypyc compiles refuses interpreted subclasses
otherwise; with it, calls of its methods first check for an override. * `acyclic=True`: no instance is part of a cycle
of references, so Python's cycle collector ignores it: it is 16 bytes smaller, and made and freed faster. For the
records that a run makes by the million, which refer to one another in one direction only. An instance in a cycle would
never be freed. * `free_list_len=1`: the next instance reuses the memory of the one freed last. For records that live
from one decision to the next.

mypyc recognises the decorator by its name, so mypyc need not be installed at run time.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

__all__ = ["mypyc_attr"]

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr
else:
    T = TypeVar("T")

    def mypyc_attr(**attributes: object) -> Callable[[type[T]], type[T]]:
        """Return a decorator without effect."""
        del attributes
        return lambda cls: cls
