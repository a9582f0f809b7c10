"""Words for an exception that would end the process, raised by code from outside this tree (a plug-in).

`sys.exit()` in a policy would end a simulation, or a scheduler, as if all had gone well, without a word.
"""

from pathlib import Path
from types import FrameType

_PACKAGE = __name__.partition(".")[0]


def exit_in_words(error: BaseException) -> str:
    """Return what raised it, where, and what to do: the method that this tree called last.

    Args:
        error: no `Exception`; as caught, with its traceback.
    """
    what = f"{type(error).__name__}({', '.join(map(repr, error.args))})"
    called = place = error.__traceback__
    while place is not None:
        if _is_ours(place.tb_frame):
            called = place.tb_next
        place = place.tb_next
    if called is None:
        return f"{what} was raised"
    frame = called.tb_frame
    where = f"{Path(frame.f_code.co_filename).name}, line {called.tb_lineno}"
    return f"{_method(frame)} raised {what} ({where}); raise another exception, and only the requests concerned end"


def _is_ours(frame: FrameType) -> bool:
    name: str = frame.f_globals.get("__name__", "")
    return name == _PACKAGE or name.startswith(f"{_PACKAGE}.")


def _method(frame: FrameType) -> str:
    """Name a method by the class of its object, as settings do, which may inherit it; a function by its module."""
    if "self" in frame.f_locals:
        cls = type(frame.f_locals["self"])
        return f"{cls.__module__}:{cls.__qualname__}.{frame.f_code.co_name}"
    return f"{frame.f_globals.get('__name__', '')}:{frame.f_code.co_qualname}"
