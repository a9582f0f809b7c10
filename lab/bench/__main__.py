"""`python -m lab.bench [fidelity|last-hop|deep-queues|...]`: run benchmarks, print and write them as JSON.

Exit code 1 if something broke; never because something was slow.
"""

from lorrery.service.entry_point import set_up_grpc

if __name__ == "__main__":
    set_up_grpc()  # before the modules that import gRPC

import asyncio
import json
import traceback
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
import uvloop
from rich.console import Console, RenderableType
from rich.status import Status
from rich.text import Text

from lab.bench import (
    decisions,
    deep_queues,
    fidelity,
    last_hop,
    live_vs_sim,
    machine,
    plans,
    scale,
    sim_growth,
    sim_speed,
    sim_tables,
    step_cpu,
    worker_lag,
)
from lab.bench.cluster import BenchBrokenError
from lorrery.service.commands import Command, command_app
from lorrery.service.errors import LorreryError
from lorrery.service.settings.sections import LogSettings
from lorrery.service.telemetry.log import configure

FORMAT_VERSION = 2
OUT = Path("out") / "bench.json"

WIDTH = 120
"""Columns that the widest table needs."""

T = TypeVar("T")

app = command_app()


@dataclass(frozen=True, slots=True)
class Run:
    """What the command line asks of a benchmark.

    Attributes:
        quick: short windows and small loads.
        seconds: length of the fidelity run, if given.
        repetitions: number of windows, if given.
        tell: shows what is measured now.
    """

    quick: bool
    seconds: float | None
    repetitions: int | None
    tell: Callable[[str], None]

    def either(self, quick: T, full: T) -> T:
        """Return the value for a quick run or for a full one."""
        return quick if self.quick else full

    def rounds(self, quick: int, full: int) -> int:
        """Return the number of windows."""
        return self.repetitions if self.repetitions is not None else self.either(quick, full)

    def wait(self, measuring: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine under the loop type of the services and the load generator."""
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(measuring)


Results = Iterator[tuple[str, object, RenderableType]]
"""Name in the JSON, figures, and the table to print."""


def _fidelity(run: Run) -> Results:
    found = run.wait(fidelity.measure(run.seconds if run.seconds is not None else run.either(15.0, 60.0)))
    yield "fidelity", asdict(found), fidelity.fidelity_table(found)


def _last_hop(run: Run) -> Results:
    rows = run.wait(last_hop.measure(run.either(2.0, 4.0), run.rounds(3, 5), run.tell))
    yield "last_hop", [{**asdict(row), "void": row.void} for row in rows], last_hop.last_hop_table(rows)


def _deep_queues(run: Run) -> Results:
    holds = run.wait(deep_queues.measure())
    yield "deep_queues", [asdict(hold) for hold in holds], deep_queues.hold_table(holds)
    costs = decisions.measure(
        run.either(300, 1000), lambda row: run.tell(f"{row.policy}, {row.batching}, {row.memory}")
    )
    yield "decisions", [asdict(cost) for cost in costs], decisions.decision_table(costs)


def _sim_speed(run: Run) -> Results:
    speed = sim_speed.measure(run.either(sim_speed.QUICK, sim_speed.Sizes()), run.tell)
    yield "sim_speed", speed.as_json(), sim_tables.sim_speed(speed)
    growth = sim_growth.measure(run.either(sim_growth.QUICK, sim_growth.Sizes()), run.tell)
    yield "sim_growth", growth.as_json(), sim_tables.sim_growth(growth)


def _live_vs_sim(run: Run) -> Results:
    found = run.wait(live_vs_sim.measure(run.either(20.0, 60.0), run.tell))
    yield "live_vs_sim", found.as_json(), live_vs_sim.live_vs_sim_table(found)
    changed = run.wait(live_vs_sim.measure_changed(run.either(20.0, 60.0), run.tell))
    yield "counterfactuals", {name: asdict(one) for name, one in changed.items()}, live_vs_sim.changed_table(changed)


def _step_cpu(run: Run) -> Results:
    rows = run.wait(step_cpu.measure(run.either(2.0, 4.0), run.rounds(3, 5), run.tell))
    yield "step_cpu", [asdict(row) for row in rows], step_cpu.step_table(rows)


def _scale(run: Run) -> Results:
    found = run.wait(scale.measure(run.either(3.0, 6.0), run.rounds(1, 3), run.tell))
    yield "scale", [{**asdict(one), "void": one.void} for one in found], scale.scale_table(found)


def _lag(run: Run) -> Results:
    found = run.wait(worker_lag.measure(run.either(5.0, 10.0), run.rounds(1, 3), run.tell))
    yield "lag", [asdict(one) for one in found], worker_lag.lag_table(found)


def _plans(run: Run) -> Results:
    found = plans.measure(run.tell, plans.QUESTIONS[: run.either(3, len(plans.QUESTIONS))])
    yield "plans", [{**asdict(one), "equal": one.equal} for one in found], plans.plans_table(found)


BENCHMARKS: dict[str, Callable[[Run], Results]] = {
    "fidelity": _fidelity,
    "last-hop": _last_hop,
    "deep-queues": _deep_queues,
    "sim-speed": _sim_speed,
    "live-vs-sim": _live_vs_sim,
    "step-cpu": _step_cpu,
    "scale": _scale,
    "lag": _lag,
    "plans": _plans,
}


def _known(names: list[str] | None) -> list[str] | None:
    for name in names or ():
        if name not in BENCHMARKS:
            raise typer.BadParameter(f"no benchmark {name!r}; there are {', '.join(BENCHMARKS)}")
    return names


@app.command(cls=Command)
def main(
    which: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", callback=_known, help=f"Of {', '.join(BENCHMARKS)}; default: all."),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=fidelity.SHORTEST_SECONDS, help="Length of the fidelity run; default: 60, with --quick 15."),
    ] = None,
    repetitions: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Windows of last-hop, step-cpu, scale and lag; default: 5, 5, 3 and 3, --quick 3 (scale, lag: 1).",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Short runs and small loads, more noise.")] = False,
    out: Annotated[Path, typer.Option(help="File for the JSON results.")] = OUT,
) -> None:
    """Measure pace, CPU per token, decision and simulated request, and live against simulated. See docs/benchmarks.md.

    Needs a machine with little else to do; what others took from it is part of the report.

    Examples:
      python -m lab.bench --quick
      python -m lab.bench deep-queues sim-speed
    """
    configure(LogSettings(level="warning"), "bench")  # services in this process would otherwise log each request
    console = Console()
    console.width = max(console.width, WIDTH)
    facts = machine.facts()
    console.print(Text("  ".join(f"{name} {value}" for name, value in facts.items()), style="dim"))
    results: dict[str, object] = {}
    broken: dict[str, str] = {}
    try:
        for name in dict.fromkeys(which or BENCHMARKS):
            try:
                with console.status(name) as status:
                    tell = partial(_tell, status, name)
                    for key, figures, table in BENCHMARKS[name](Run(quick, seconds, repetitions, tell)):
                        results[key] = figures
                        console.print(table)
            except (BenchBrokenError, LorreryError) as error:
                broken[name] = str(error)
                console.print(f"[bold red]{name} broke:[/] {error}")
            except Exception:
                broken[name] = traceback.format_exc()
                console.print_exception()
    finally:
        facts["load_average_1m_at_end"] = machine.load_average()
        console.print(f"load average of the last minute: {facts['load_average_1m_at_end']}", style="dim")
        _write(out, {"format_version": FORMAT_VERSION, "machine": facts, **results, "broken": broken})
        console.print(f"written to {out}", highlight=False)
    raise typer.Exit(1 if broken else 0)


def _tell(status: Status, name: str, what: str) -> None:
    status.update(f"{name}: {what}")


def _write(path: Path, content: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app(prog_name="python -m lab.bench")
