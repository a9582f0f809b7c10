"""Names and ids that others send: which are valid, how they are shown, and a dict of bounded size keyed by them.

Names travel in every message about a request, are metric labels and appear in comma-separated lists, so they must be
short and visible. The settings, the router and the scheduler all validate them here.
"""

from typing import Generic, TypeVar

MAX_NAME_CHARACTERS = 512
"""Upper bound on a name or id, which is in every message about a request and in the log."""
MAX_QUOTED_CHARACTERS = 100
"""Characters of a given value that a message or the log shows."""


def quoted(value: str) -> str:
    """Return the repr of a given value for a message or the log, truncated if long."""
    if len(value) <= MAX_QUOTED_CHARACTERS:
        return repr(value)
    return f"{value[:MAX_QUOTED_CHARACTERS]!r}..."


def cut(text: str) -> str:
    """Return a given text for a message, without quotes, truncated if long."""
    return text if len(text) <= MAX_QUOTED_CHARACTERS else f"{text[:MAX_QUOTED_CHARACTERS]}..."


def gpu_names(process: str, gpus: int) -> tuple[str, ...]:
    """Return the names of a process's workers, one per GPU."""
    return (process,) if gpus == 1 else tuple(f"{process}.{number}" for number in range(gpus))


def is_hosted_by(worker: str, process: str) -> bool:
    """Return whether a worker's name is one that `gpu_names` gives to this process, for any number of GPUs."""
    host, dot, number = worker.rpartition(".")
    return worker == process or (bool(dot) and host == process and number.isdecimal())


def too_long(text: str) -> str | None:
    """Return what is wrong with the length of a name or id; None: nothing."""
    if len(text) <= MAX_NAME_CHARACTERS:
        return None
    return f"has {len(text)} characters; at most {MAX_NAME_CHARACTERS} are allowed; it begins {quoted(text)}"


def why_no_name(text: str) -> str | None:
    """Return why `text` is not a valid name, with a suggestion; None: it is valid.

    A name has 1 to `MAX_NAME_CHARACTERS` characters, all printable and none blank (by Unicode).
    """
    if not text:
        return "is empty"
    why = too_long(text)
    if why is not None:
        return why
    wrong = [char for char in text if char.isspace() or not char.isprintable()]
    if not wrong:
        return None
    instead = "".join("-" if char in wrong else char for char in text)
    return (
        f"is {quoted(text)}, with {wrong[0]!r} at character {text.index(wrong[0]) + 1}; blanks and control characters"
        f" are not allowed; {quoted(instead)} would do"
    )


K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """The entries that were put last.

    Args:
        max_entries: upper bound on the entries; the oldest is dropped first.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._entries: dict[K, V] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def put(self, key: K, value: V) -> None:
        """Add an entry, or make it the newest."""
        self._entries.pop(key, None)
        self._entries[key] = value
        while len(self._entries) > self._max_entries:
            del self._entries[next(iter(self._entries))]

    def pop(self, key: K) -> V | None:
        """Remove an entry and return its value; None: absent."""
        return self._entries.pop(key, None)
