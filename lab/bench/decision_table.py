"""Shows the figures of `lab.bench.deep_policies` as tables in a terminal."""

from collections.abc import Iterable

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lab.bench.core import AIM_BATCH
from lab.bench.deep_policies import AIM_BYTES, AIM_US, NUM_WAITING, DecisionCost, DecisionCosts


def decision_table(results: Iterable[DecisionCosts]) -> Group:
    """Show the cost of each decision, one table for each core."""
    shown: list[Table | Text] = []
    for result in results:
        shown += [_table(result), _notes(result)]
    return Group(*shown)


def _table(result: DecisionCosts) -> Table:
    table = Table(
        title=f"Deep queues: CPU of a decision, {result.core} core, batch {AIM_BATCH}, {NUM_WAITING:,} waiting, us"
        f" (aim: plan and commit <= {AIM_US:g})"
    )
    for name in ("policy", "batching", "memory", "full"):
        table.add_column(name, no_wrap=True)
    names = ["plan p50", "p99", "no entry p99", "an entry", "p99", "many/few", "entries", "commit p50", "p99"]
    for name in [*names, "enqueue", "cancel"]:
        table.add_column(name, justify="right")
    for row in result.rows:
        table.add_row(row.policy, row.batching, row.memory, row.pressure, *_figures(row))
    return table


def _figures(row: DecisionCost) -> list[str]:
    return [
        f"{row.plan_p50_us:.0f}",
        f"{row.plan_p99_us:.0f}",
        _or_dash(row.quiet_plan_p99_us, ".0f"),
        _or_dash(row.admission_us, ".1f"),
        _or_dash(row.admission_p99_us, ".0f"),
        _or_dash(row.admission_growth, ".2f"),
        f"{row.num_admitted:.1f}",
        f"{row.commit_p50_us:.0f}",
        f"{row.commit_p99_us:.0f}",
        f"{row.enqueue_us:.1f}",
        f"{row.cancel_us:.1f}",
    ]


def _or_dash(figure: float | None, form: str) -> str:
    return "-" if figure is None else format(figure, form)


def _notes(result: DecisionCosts) -> Text:
    most = max(result.waiting_bytes, key=lambda policy: result.waiting_bytes[policy])
    return Text(
        f"{result.num_met} of {len(result.rows)} rows within the aim at p99; a plain loop over the batch:"
        f" {result.rows[0].reference_us:.0f} us; a request that waits takes at most"
        f" {result.waiting_bytes[most]:,.0f} bytes ({most}; aim <= {AIM_BYTES:,})"
    )
