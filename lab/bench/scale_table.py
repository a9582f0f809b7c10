"""Shows the figures of `lab.bench.scale` as a table in a terminal."""

from collections.abc import Iterable

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lab.bench.scale import SERVICES, Scaled


def scale_table(found: Iterable[Scaled]) -> Group:
    """Show the resource use of each service, by size of cluster."""
    table = Table(title="Scale: CPU of all processes of a service, at one rate of tokens; lag at p99", padding=0)
    names = ["GPUs", "streams", "routers", "shards", "tokens/s", "steps/s"]
    names += [f"{service}\ncores" for service in ("router", "schedul.", "worker")]
    names += ["router\nus/token", "schedul.\nus/step", "worker\nus/step", "router\nlag, ms", "worker\nlag, ms"]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    notes: list[Text] = []
    for one in found:
        case = one.case
        table.add_row(
            *(f"{size:,}" for size in (case.gpus, case.streams, case.routers, case.shards)),
            f"{one.median(lambda window: window.tokens / window.seconds):,.0f}",
            f"{one.median(lambda window: window.steps / window.seconds):,.0f}",
            *(f"{one.cores(service):.2f}" for service in SERVICES),
            f"{one.us_per_token('router'):.0f}",
            f"{one.us_per_step('scheduler'):,.0f}",
            f"{one.us_per_step('worker'):,.0f}",
            f"{one.lag_ms('router'):.1f}",
            f"{one.lag_ms('worker'):.1f}",
        )
        if one.void:
            notes.append(Text(f"void: {case}: {one.void}", style="bold red"))
    return Group(table, *notes)
