"""Shows the figures of `lab.bench.many_streams` as a table in a terminal."""

from collections.abc import Iterable

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lab.bench.many_streams import AIM_RATIO, ManyStreams


def stream_table(edges: Iterable[ManyStreams]) -> Group:
    """Show the cost of a token in the router and the load generator, by number of streams."""
    table = Table(title="Last hop: CPU of router and client per token, by number of streams, at one rate of tokens")
    table.add_column("streams")
    for name in (
        "tokens/s",
        "per message",
        "us/message",
        "us/token",
        "tokens per CPU second",
        f"to the fewest (aim >= {AIM_RATIO})",
        "lag p99, ms",
    ):
        table.add_column(name, justify="right")
    notes: list[Text] = []
    for edge in edges:
        for num in edge.windows:
            table.add_row(
                f"{num:,} {edge.edge}, {edge.process}",
                f"{edge.median(num, lambda window: window.tokens / window.seconds):,.0f}",
                f"{edge.median(num, lambda window: window.tokens / window.messages):.3f}",
                f"{edge.median(num, lambda window: window.us_per_message):.1f}",
                f"{edge.median(num, lambda window: window.us_per_token):.1f}",
                f"{edge.median(num, lambda window: window.tokens / window.cpu_seconds):,.0f}",
                f"{edge.ratio(num):.2f}",
                f"{edge.median(num, lambda window: window.lag_seconds) * 1e3:.1f}",
            )
        table.add_section()
        if edge.void:
            notes.append(Text(f"void: {edge.void}", style="bold red"))
    return Group(table, *notes)
