"""Makes Python's garbage collector run rarely during a simulation, where there is hardly any cyclic garbage.

A simulation's objects (requests, plans, events) refer to one another in one direction only, and are freed with the last
reference. The collector, which looks for cycles whenever 700 more objects have been made than freed, finds none; with
the compiled core its passes over the open requests took a tenth of a run.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEW_OBJECTS = 100_000
"""New objects between two passes over the youngest generation: some 20 MB, should they be garbage after all."""


@contextmanager
def collected_seldom() -> Iterator[None]:
    """Raise this process's collection threshold to `NEW_OBJECTS` for a while. A disabled collector stays disabled."""
    before = gc.get_threshold()
    gc.set_threshold(before[0] and max(before[0], NEW_OBJECTS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
