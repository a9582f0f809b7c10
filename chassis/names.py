"""What adapters and workers may be called, and how the GPUs of a worker process follow from its name.

Their names travel in every message about a request, are labels of metrics and stand in lists separated by commas, so
they are short and visible. Whoever takes one in asks here: the settings, the router, the scheduler.
"""

MAX_NAME_CHARACTERS = 512
"""Longest name or id: they travel in every message about a request and in the log."""
MAX_QUOTED_CHARACTERS = 100
"""So much of a value that somebody gave stands in a message or in the log."""


def quoted(value: str) -> str:
    """Return a value that somebody gave for a message or the log, cut where it is long."""
    if len(value) <= MAX_QUOTED_CHARACTERS:
        return repr(value)
    return f"{value[:MAX_QUOTED_CHARACTERS]!r}..."


def cut(text: str) -> str:
    """Return a text that somebody gave for a message, without quotes, cut where it is long."""
    return text if len(text) <= MAX_QUOTED_CHARACTERS else f"{text[:MAX_QUOTED_CHARACTERS]}..."


def gpu_names(process: str, gpus: int) -> tuple[str, ...]:
    """Return the names of a process's workers: one for each of its GPUs."""
    return (process,) if gpus == 1 else tuple(f"{process}.{number}" for number in range(gpus))


def is_hosted_by(worker: str, process: str) -> bool:
    """Tell whether a worker has a name that `gpu_names` gives to a process's workers, however many there are."""
    host, dot, number = worker.rpartition(".")
    return worker == process or (bool(dot) and host == process and number.isdecimal())


def too_long(text: str) -> str | None:
    """Say what is wrong with the length of a name or an id, or None if nothing is."""
    if len(text) <= MAX_NAME_CHARACTERS:
        return None
    return f"has {len(text)} characters; at most {MAX_NAME_CHARACTERS} are allowed; it begins {quoted(text)}"


def why_no_name(text: str) -> str | None:
    """Say why `text` cannot be a name, and what could be; None if it can.

    A name has 1 to `MAX_NAME_CHARACTERS` characters, none of them blank (as Unicode has it) or not printable.
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
