"""When Python looks for garbage during a simulation: seldom, for there is hardly any.

What a simulation makes (requests, plans, events) refers to one another in one direction only, and goes when the last
reference to it does. The collector, which looks for cycles whenever 700 more objects have been made than freed, finds
none; with the compiled core its passes over the open requests took a tenth of a run.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEW_OBJECTS = 100_000
"""Between two passes over the young: some 20 MB, should they be garbage after all."""


@contextmanager
def collected_seldom() -> Iterator[None]:
    """Let the collector of this process wait for `NEW_OBJECTS`; as before afterwards. One that is off stays so."""
    before = gc.get_threshold()
    gc.set_threshold(before[0] and max(before[0], NEW_OBJECTS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
