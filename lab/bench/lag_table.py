"""Shows the figures of `lab.bench.worker_lag` as a table in a terminal."""

from collections.abc import Iterable

from rich.table import Table

from lab.bench.scale import SERVICES
from lab.bench.worker_lag import AIM_SECONDS, Lagging


def lag_table(found: Iterable[Lagging]) -> Table:
    """Show how late workers were, next to a process that only sleeps."""
    aim_ms = AIM_SECONDS * 1e3
    table = Table(title=f"Worker lag (aim: p99 under {aim_ms:g} ms), and a process that only sleeps", padding=0)
    names = ["GPUs", "step, ms", "real-\ntime", "steps/s", "lag p50,\nms", "p99,\nms", f"within\n{aim_ms:g} ms"]
    names += ["sleeps p50,\nms", "p99,\nms", "waited for\na core", "load\naverage"]
    names += [f"{service}\ncores" for service in (*SERVICES, "client")]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for one in found:
        table.add_row(
            f"{one.case.gpus}",
            f"{one.case.step_ms:g}",
            one.realtime,
            f"{one.median(lambda window: window.steps_per_second):,.0f}",
            f"{one.median(lambda window: window.lag_seconds[0]) * 1e3:.2f}",
            f"{one.median(lambda window: window.lag_seconds[1]) * 1e3:.2f}",
            f"{one.median(lambda window: window.in_time_ratio):.2%}",
            f"{one.median(lambda window: window.slept_seconds[0]) * 1e3:.2f}",
            f"{one.median(lambda window: window.slept_seconds[1]) * 1e3:.2f}",
            f"{one.median(lambda window: window.waited_ratio or 0.0):.1%}",
            f"{one.median(lambda window: window.load_average):.1f}",
            *(f"{one.median(lambda window: window.cores[name]):.2f}" for name in (*SERVICES, "client")),  # noqa: B023
        )
    return table
