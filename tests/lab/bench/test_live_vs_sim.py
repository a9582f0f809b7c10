"""The load that live and simulated runs are compared on is what the benchmark promises."""

import io
import json

import pytest
from rich.console import Console

from lab.bench import live_vs_sim
from lab.bench.cluster import CONFIG
from lorrery.service.settings.cluster import load
from lorrery.simulator.replay.parts import Replayed
from lorrery.simulator.run import SimulatedRun, SimulationOptions


@pytest.mark.parametrize("seconds", [20.0, 60.0])
def test_the_load_has_few_streams_and_first_tokens_that_take_time(seconds: float) -> None:
    options = live_vs_sim.options_for(seconds)
    report = SimulatedRun(load(CONFIG, live_vs_sim.SETTINGS), options, SimulationOptions(workers=1)).run()
    assert report.summary.num_completed == report.summary.num_requests
    assert live_vs_sim.most_at_once(report) <= live_vs_sim.MOST_STREAMS
    assert report.summary.from_intended.ttft_ms.p50 >= live_vs_sim.LEAST_TTFT_MS


def test_a_figures_difference_is_relative_to_the_live_one() -> None:
    figure = live_vs_sim.Figure(live_p50=200.0, simulated_p50=190.0, live_p99=400.0, simulated_p99=404.0)
    assert figure.difference == pytest.approx(-0.05)
    assert figure.p99_difference == pytest.approx(0.01)


def test_the_results_are_json() -> None:
    found = live_vs_sim.LiveVsSim(2, 1.0, 2, {"TTFT": live_vs_sim.Figure(2.0, 1.0, 4.0, 3.0)}, 0.1, 0.2, Replayed(), ())
    assert json.loads(json.dumps(found.as_json()))["p50_differences"] == {"TTFT": -0.5}


def test_a_change_has_a_row_for_each_metric() -> None:
    figures = (100.0, 10.0, 1000.0)
    rerun = live_vs_sim.Rerun(figures, (102.0, 10.0, 990.0), figures, (200.0, 10.0, 1000.0), 0.1)
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(live_vs_sim.changed_table({"GPU": rerun}))
    lines = [line.split() for line in console.export_text().splitlines() if "TTFT" in line or "E2E" in line]
    assert "+2.00%" in lines[0]
    assert "-49.00%" in lines[0]
    assert "-1.00%" in lines[1]
