"""Annotations of a benchmark's figures: whether an aim is met, and why a run is void.

An *aim* is a target for a figure: values that prototypes of the same design reached, for ratios that do not depend on
the machine. A missed aim deserves a look; it is not a failure.
"""

from collections.abc import Iterable

from rich.text import Text

BUSY_DELAY = 0.1
"""Share of the time that a process waits for a core, above which the machine is busy."""


def notes_below(void: str, delay: float | None) -> list[Text]:
    """Return the lines below a table: why the run is void, and how long a process waited for a core (None: unknown)."""
    lines = []
    if void:
        lines.append(Text(f"VOID: {void}", style="bold red"))
    if delay is None:
        lines.append(Text("this kernel does not tell how long a process waits for a core", style="yellow"))
    elif delay > BUSY_DELAY:
        lines.append(Text(f"busy machine: a process waited for a core {delay:.0%} of the time", style="yellow"))
    return lines


def meets(met: bool) -> str:
    """Return the word for an aim that is met or missed."""
    return "[green]met[/]" if met else "[yellow]missed[/]"


def ms(seconds: Iterable[float | None]) -> str:
    """Format times in milliseconds; None: unknown."""
    return ", ".join("-" if value is None else f"{value * 1e3:.2f}" for value in seconds) + " ms"


def percent(ratio: float | None) -> str:
    """Format a ratio in per cent; None: unknown."""
    return "unknown" if ratio is None else f"{ratio:.1%}"


def or_dash(figure: float | None, form: str) -> str:
    """Format a figure; None: there was nothing to measure."""
    return "-" if figure is None else format(figure, form)
