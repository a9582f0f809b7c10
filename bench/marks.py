"""What stands beside a benchmark's figures: whether an aim is met, what makes a run void, and the machine.

An *aim* is what a figure is meant to be: values that prototypes of the same shape reached, on the ratios that survive a
change of machine. An aim missed is worth a look, no failure.
"""

from collections.abc import Iterable

from rich.text import Text

BUSY_DELAY = 0.1
"""Share of the time for which a process waits for a core on a busy machine."""


def machine_line(facts: dict[str, object]) -> Text:
    """Show where the run is made."""
    return Text("  ".join(f"{name} {value}" for name, value in facts.items()), style="dim")


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
    """Return the word for an aim that is met, or not."""
    return "[green]met[/]" if met else "[yellow]missed[/]"


def ms(seconds: Iterable[float | None]) -> str:
    """Return times in milliseconds; None: unknown."""
    return ", ".join("-" if value is None else f"{value * 1e3:.2f}" for value in seconds) + " ms"


def percent(ratio: float | None) -> str:
    """Return a ratio in per cent; None: unknown."""
    return "unknown" if ratio is None else f"{ratio:.1%}"
