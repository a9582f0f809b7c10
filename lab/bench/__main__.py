"""`python -m lab.bench [fidelity|last-hop|core|deep-queues|...]`: run benchmarks, print and write them as JSON.

Exit code 1 if something broke; never because something was slow.
"""

from lorrery.chassis.grpc_core import set_up_grpc

if __name__ == "__main__":
    set_up_grpc()  # before the modules that import gRPC

import asyncio
import json
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
import uvloop
from rich.console import Console

from lab.bench import (
    clients,
    core,
    deep_policies,
    deep_queues,
    failures,
    fidelity,
    last_hop,
    live_vs_sim,
    machine,
    many_streams,
    metrics_cost,
    overload,
    scale,
    sim_growth,
    sim_speed,
    sim_tables,
    step_cpu,
    tables,
    tracing_cost,
    worker_lag,
)
from lab.bench.client_table import client_table
from lab.bench.cluster import BenchBrokenError
from lab.bench.decision_table import decision_table
from lab.bench.lag_table import lag_table
from lab.bench.marks import machine_line
from lab.bench.scale_table import scale_table
from lab.bench.stream_table import stream_table
from lorrery.chassis.commands import Command, command_app
from lorrery.chassis.errors import LorreryError
from lorrery.chassis.log import configure
from lorrery.chassis.sections import LogSettings

FORMAT_VERSION = 2
OUT = Path("out") / "bench.json"

WIDTH = 120
"""Columns that the widest table needs."""

T = TypeVar("T")

app = command_app()


class Benchmark(Enum):
    """The benchmarks."""

    FIDELITY = "fidelity"
    LAST_HOP = "last-hop"
    CORE = "core"
    DEEP_QUEUES = "deep-queues"
    FAILURES = "failures"
    SIM_SPEED = "sim-speed"
    LIVE_VS_SIM = "live-vs-sim"
    OVERLOAD = "overload"
    CLIENTS = "clients"
    METRICS = "metrics"
    TRACING = "tracing"
    STEP_CPU = "step-cpu"
    SCALE = "scale"
    LAG = "lag"


@app.command(cls=Command)
def main(
    which: Annotated[list[Benchmark] | None, typer.Argument(help="Benchmarks to run; default: all.")] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=fidelity.SHORTEST_SECONDS, help="Length of the fidelity run; default: 60, with --quick 15."),
    ] = None,
    repetitions: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Windows of last-hop, clients, metrics, tracing, step-cpu, scale and lag; default: 5, 5, 7, 7, 5, 3 "
            "and 3, --quick 3 (scale, lag: 1).",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Short runs and small loads, more noise.")] = False,
    out: Annotated[Path, typer.Option(help="File for the JSON results.")] = OUT,
) -> None:
    """Measure pace, CPU per token, decision and simulated request, and live against simulated. See docs/benchmarks.md.

    Needs a machine with little else to do; what others took from it is part of the report.

    Examples:
      python -m lab.bench --quick
      python -m lab.bench core sim-speed
    """
    configure(LogSettings(level="warning"), "bench")  # services in this process would otherwise log each request
    console = Console()
    console.width = max(console.width, WIDTH)
    facts = machine.facts()
    console.print(machine_line(facts))
    results: dict[str, object] = {}
    broken: dict[str, str] = {}

    def run_fidelity() -> None:
        length = seconds if seconds is not None else 15.0 if quick else 60.0
        with console.status(f"fidelity: {length:g} s and about ten more"):
            result = _in_loop(lambda: fidelity.measure(length))
        results["fidelity"] = asdict(result)
        console.print(tables.fidelity(result))

    def run_last_hop() -> None:
        pairs = repetitions if repetitions is not None else 3 if quick else 5
        with console.status("last hop") as status:
            rows = _in_loop(
                lambda: last_hop.measure(2.0 if quick else 4.0, pairs, lambda what: status.update(f"last hop: {what}"))
            )
        results["last_hop"] = [{**asdict(row), "void": row.void} for row in rows]
        console.print(tables.last_hop(rows))
        with console.status("many streams") as status:
            edges = _in_loop(
                lambda: many_streams.measure(
                    2.0 if quick else 4.0, pairs, lambda what: status.update(f"many streams: {what}")
                )
            )
        results["many_streams"] = [{**asdict(edge), "void": edge.void} for edge in edges]
        console.print(stream_table(edges))

    def run_core() -> None:
        with console.status("core") as status:
            rows = core.measure(
                500 if quick else 2000, lambda row: status.update(f"core: {row.policy}, batch {row.batch}")
            )
        results["core"] = [asdict(row) for row in rows]
        console.print(tables.core(rows))

    def run_deep_queues() -> None:
        with console.status("deep queues"):
            rows = _in_loop(deep_queues.measure)
        results["deep_queues"] = [asdict(row) for row in rows]
        console.print(tables.deep_queues(rows))
        with console.status("deep queues") as status:
            costs = deep_policies.measure(
                300 if quick else 1000,
                lambda row: status.update(f"deep queues: {row.policy}, {row.batching}, {row.memory}"),
            )
        results["decisions"] = [asdict(result) for result in costs]
        console.print(decision_table(costs))

    def run_failures() -> None:
        with console.status("failures") as status:
            rows = _in_loop(lambda: failures.measure(lambda what: status.update(f"failures: {what}")))
        results["failures"] = [asdict(row) for row in rows]
        console.print(tables.failures(rows))

    def run_sim_speed() -> None:
        with console.status("sim-speed") as status:
            result = sim_speed.measure(
                sim_speed.QUICK if quick else sim_speed.Sizes(), lambda what: status.update(f"sim-speed: {what}")
            )
        results["sim_speed"] = result.as_json()
        console.print(sim_tables.sim_speed(result))
        with console.status("sim-speed") as status:
            growth = sim_growth.measure(
                sim_growth.QUICK if quick else sim_growth.Sizes(), lambda what: status.update(f"sim-speed: {what}")
            )
        results["sim_growth"] = growth.as_json()
        console.print(sim_tables.sim_growth(growth))

    def run_live_vs_sim() -> None:
        with console.status("live-vs-sim") as status:
            result = _in_loop(
                lambda: live_vs_sim.measure(20.0 if quick else 60.0, lambda what: status.update(f"live-vs-sim: {what}"))
            )
        results["live_vs_sim"] = result.as_json()
        console.print(sim_tables.live_vs_sim(result))

    def run_overload() -> None:
        with console.status("overload") as status:
            result = _in_loop(
                lambda: overload.measure(20.0 if quick else 60.0, lambda what: status.update(f"overload: {what}"))
            )
        results["overload"] = result.as_json()
        console.print(tables.overload(result))

    def run_clients() -> None:
        pairs = repetitions if repetitions is not None else 3 if quick else 5
        with console.status("clients") as status:
            result = _in_loop(
                lambda: clients.measure(2.0 if quick else 4.0, pairs, lambda what: status.update(f"clients: {what}"))
            )
        results["clients"] = asdict(result)
        console.print(client_table(result))

    def run_metrics() -> None:
        pairs = repetitions if repetitions is not None else 3 if quick else 7
        with console.status("metrics") as status:
            result = _in_loop(
                lambda: metrics_cost.measure(
                    5.0 if quick else 10.0, pairs, lambda what: status.update(f"metrics: {what}")
                )
            )
        results["metrics"] = asdict(result)
        console.print(tables.metrics_cost(result))

    def run_step_cpu() -> None:
        pairs = repetitions if repetitions is not None else 3 if quick else 5
        with console.status("step CPU") as status:
            rows = _in_loop(
                lambda: step_cpu.measure(2.0 if quick else 4.0, pairs, lambda what: status.update(f"step CPU: {what}"))
            )
        results["step_cpu"] = [asdict(row) for row in rows]
        console.print(tables.step_cpu(rows))

    def run_scale() -> None:
        rounds = repetitions if repetitions is not None else 1 if quick else 3
        with console.status("scale") as status:
            found = _in_loop(
                lambda: scale.measure(3.0 if quick else 6.0, rounds, lambda what: status.update(f"scale: {what}"))
            )
        results["scale"] = [{**asdict(one), "void": one.void} for one in found]
        console.print(scale_table(found))

    def run_lag() -> None:
        rounds = repetitions if repetitions is not None else 1 if quick else 3
        with console.status("lag") as status:
            found = _in_loop(
                lambda: worker_lag.measure(5.0 if quick else 10.0, rounds, lambda what: status.update(f"lag: {what}"))
            )
        results["lag"] = [asdict(one) for one in found]
        console.print(lag_table(found))

    def run_tracing() -> None:
        rounds = repetitions if repetitions is not None else 3 if quick else 7
        with console.status("tracing") as status:
            result = _in_loop(
                lambda: tracing_cost.measure(
                    5.0 if quick else 10.0, rounds, lambda what: status.update(f"tracing: {what}")
                )
            )
        results["tracing"] = asdict(result)
        console.print(tables.tracing_cost(result))

    runs: dict[Benchmark, Callable[[], None]] = {
        Benchmark.FIDELITY: run_fidelity,
        Benchmark.LAST_HOP: run_last_hop,
        Benchmark.CORE: run_core,
        Benchmark.DEEP_QUEUES: run_deep_queues,
        Benchmark.FAILURES: run_failures,
        Benchmark.SIM_SPEED: run_sim_speed,
        Benchmark.LIVE_VS_SIM: run_live_vs_sim,
        Benchmark.OVERLOAD: run_overload,
        Benchmark.CLIENTS: run_clients,
        Benchmark.METRICS: run_metrics,
        Benchmark.TRACING: run_tracing,
        Benchmark.STEP_CPU: run_step_cpu,
        Benchmark.SCALE: run_scale,
        Benchmark.LAG: run_lag,
    }
    try:
        for benchmark in dict.fromkeys(which or Benchmark):
            try:
                runs[benchmark]()
            except (BenchBrokenError, LorreryError) as error:
                broken[benchmark.value] = str(error)
                console.print(f"[bold red]{benchmark.value} broke:[/] {error}")
            except Exception:
                broken[benchmark.value] = traceback.format_exc()
                console.print_exception()
    finally:
        facts["load_average_1m_at_end"] = machine.load_average()
        console.print(f"load average of the last minute: {facts['load_average_1m_at_end']}", style="dim")
        _write(out, {"format_version": FORMAT_VERSION, "machine": facts, **results, "broken": broken})
        console.print(f"written to {out}", highlight=False)
    raise typer.Exit(1 if broken else 0)


def _in_loop(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    # The loop type of the services and the load generator.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(make())


def _write(path: Path, content: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app(prog_name="python -m lab.bench")
