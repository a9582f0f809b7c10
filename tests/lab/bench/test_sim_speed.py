"""The benchmark of the simulator: every load runs to its end, and the bare loop carries the same one."""

import io
import json

import numpy as np
import pytest
from rich.console import Console

from lab.bench import sim_scenarios, sim_speed, sim_tables
from lab.bench.cluster import BenchBrokenError
from lab.bench.sim_speed import (
    SCENARIOS,
    CompiledCore,
    Core,
    SimSpeed,
    Sizes,
    SpeedRow,
    measure,
    simulate,
    simulate_bare,
)

TINY = Sizes(vidur=40, uniform=60, small_uniform=30, multi_lora=30, mooncake=4, few=1, many=1)


@pytest.mark.parametrize("load", [load for load in SCENARIOS if load != "mooncake"])
def test_every_request_gets_its_tokens(load):
    scenario = SCENARIOS[load](50)
    times = simulate(scenario)
    assert times.num_finished == 50
    assert times.output_tokens == int(scenario.columns.output_tokens.sum())
    arrived_ps = scenario.columns.at_seconds * 1e12
    assert (np.array(times.first_token_ps) > arrived_ps).all()
    assert (np.array(times.finished_ps) >= np.array(times.first_token_ps)).all()


@pytest.mark.parametrize("load", ["vidur", "uniform", "doubled"])
def test_the_bare_loop_runs_as_many_at_a_time(load):
    scenario = SCENARIOS[load](400)
    ours, bare = simulate(scenario), simulate_bare(scenario)
    in_batch = [
        sum(finished - first for first, finished in zip(times.first_token_ps, times.finished_ps, strict=True))
        for times in (ours, bare)
    ]
    assert in_batch[0] == pytest.approx(in_batch[1], rel=0.15)


def test_a_load_without_the_shared_files_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(sim_scenarios, "SHARED", tmp_path)
    assert "excerpt" in sim_scenarios.mooncake(2).title


def test_a_whole_measurement_is_shown_and_written(monkeypatch, tmp_path):
    monkeypatch.setattr(sim_speed, "COMPILED", tmp_path / "absent")
    told: list[str] = []
    result = measure(TINY, told.append)
    assert any("mooncake" in what for what in told)
    content = json.loads(json.dumps(result.as_json()))
    assert set(content["rows"]) == {"vidur", "uniform small", "doubled", "uniform", "multi-lora", "mooncake", "fleet"}
    assert all(len(row["cpu_seconds"]["interpreted"]) == 1 for row in content["rows"].values())
    assert content["rows"]["uniform"]["peak_rss_mb"] > 1
    shown = Console(file=io.StringIO(), width=120)
    shown.print(sim_tables.sim_speed(result))
    text = shown.file.getvalue()
    assert "at most 8" in text
    assert "VIDUR_PYTHON" in text


def test_both_cores_are_shown_beside_each_other():
    row = SpeedRow(
        "uniform", "a load", 10, 10, 100, {Core.INTERPRETED: [3.0, 4.0], Core.COMPILED: [1.0, 1.5]}, [0.5, 0.25]
    )
    assert row.us_per_request(Core.COMPILED) == pytest.approx(125_000)
    assert row.bare_ratio(Core.INTERPRETED) == pytest.approx((3.0 / 0.5 + 4.0 / 0.25) / 2)
    result = SimSpeed(dict.fromkeys(("vidur", "uniform small", "doubled", "uniform"), row))
    shown = Console(file=io.StringIO(), width=120)
    shown.print(sim_tables.sim_speed(result))
    assert "4.00 met" in shown.file.getvalue()
    assert "make compiled" not in shown.file.getvalue()


def test_a_process_without_a_compiled_core_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(sim_speed, "COMPILED", tmp_path)  # nothing there: the checkout answers
    with CompiledCore() as core, pytest.raises(BenchBrokenError, match="make compiled"):
        core.run("uniform", 5)
