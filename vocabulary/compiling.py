"""What classes tell the compiler of the wheel, by the decorator `mypyc_attr`; interpreted, it leaves them as they are.

* `allow_interpreted_subclasses=True`: plug-ins build upon it. A class that mypyc compiles refuses interpreted
  subclasses otherwise; calls of its methods then look first whether one is overridden.
* `acyclic=True`: no instance is part of a cycle of references, so Python's search for such cycles leaves it out: it is
  16 bytes smaller, and made and freed faster. For the records that a run makes by the million, which refer to one
  another in one direction only. Should one come to be in a cycle, that would never be freed.
* `free_list_len=1`: the memory of the instance that went last is the next one's. For records that live from one
  decision to the next.

mypyc knows the decorator by its name, so nothing of mypyc's need be installed to run.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

__all__ = ["mypyc_attr"]

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr
else:
    T = TypeVar("T")

    def mypyc_attr(**attributes: object) -> Callable[[type[T]], type[T]]:
        """Return a decorator that leaves a class as it is."""
        del attributes
        return lambda cls: cls
