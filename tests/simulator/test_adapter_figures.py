"""Loads, evictions and stays of adapters in a simulated run's report."""

import csv
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

import lorrery
from lorrery.loadgen.table import print_report
from lorrery.simulator.result import SimulationResult
from lorrery.vocabulary.adapters import AdapterFigures
from lorrery.vocabulary.files import ADAPTERS_FILE, SUMMARY_FILE
from lorrery.vocabulary.units import PS_PER_SECOND

CLUSTER = {
    "model": "Llama-2-7B",
    "worker": {"gpu": "A10G"},
    "scheduler": {"policy": "fcfs"},
    "adapters": {"registry": [{"id": "a", "rank": 8, "count": 6}], "max_loras": 2, "load_failure_ratio": 0.1},
}


def run(**more: object) -> SimulationResult:
    workload = {"rate": 4, "duration": 20, "input_range": "8:64", "output_range": (4, 32), "adapters": "all"}
    return lorrery.simulate(CLUSTER, workload | {"seed": 3}, **more)


def test_summary_csv_and_table_have_the_same_figures(tmp_path: Path) -> None:
    result = run()
    result.write(tmp_path)
    total = result.report.adapter_total
    assert len(result.adapters) == 6
    assert total.num_loads > total.num_evictions > total.num_thrashes > 0 < total.num_failed_loads
    found = json.loads((tmp_path / SUMMARY_FILE).read_text())["adapter_loads"]
    assert found["total"] == total.shown()
    rows = {row.pop("adapter_id"): row for row in found["adapters"]}
    assert rows == {name: figures.shown() for name, figures in result.adapters.items()}
    with (tmp_path / ADAPTERS_FILE).open(encoding="utf-8", newline="") as file:
        lines = {line.pop("adapter_id"): line for line in csv.DictReader(file)}
    assert list(lines) == list(rows)
    for name, line in lines.items():
        assert {key: float(cell) for key, cell in line.items()} == pytest.approx(rows[name], abs=1e-6)
    text = io.StringIO()
    print_report(result.report, Console(file=text, width=120))
    assert f"{total.num_loads} loads ({total.num_failed_loads} failed)" in text.getvalue()
    most = max(result.adapters.values(), key=lambda figures: figures.num_loads)
    assert f"{most.num_loads}        {most.num_failed_loads}" in text.getvalue()


def test_stays_fill_the_places_on_the_gpus_and_no_more() -> None:
    result = run(workers=2)
    resident = result.report.adapter_total.resident_ps / PS_PER_SECOND
    duration = result.summary.duration_seconds
    assert 0.7 * 2 * 2 * duration < resident < 2 * 2 * (duration + 1)


def test_the_warm_up_counts_in_no_figure_but_its_adapters_are_there() -> None:
    workload = {
        "rate": 4,
        "duration": 10,
        "input_range": "8:64",
        "output_range": (4, 8),
        "adapters": "a-0",
        "warmup": 4,
    }
    result = lorrery.simulate(CLUSTER, workload, workers=1)
    (figures,) = result.adapters.values()
    assert figures == AdapterFigures(resident_ps=figures.resident_ps)
    assert figures.resident_ps == pytest.approx(result.cost.simulated_seconds * PS_PER_SECOND, rel=0.01)


def test_workers_that_are_lost_and_several_schedulers_add_up() -> None:
    result = run(workers=4, shards=2, faults=["worker_loss,at=5,worker=worker-0,for=2"])
    total = result.report.adapter_total
    assert 0 < total.resident_ps / PS_PER_SECOND < 4 * 2 * (result.summary.duration_seconds + 1)
    assert total.num_loads - total.num_failed_loads > total.num_evictions


def test_without_adapters_there_is_no_file(tmp_path: Path) -> None:
    result = lorrery.simulate({"model": "Llama-2-7B"}, {"rate": 4, "duration": 2})
    assert result.adapters == {}
    assert not [path for path in result.write(tmp_path) if path.name == ADAPTERS_FILE]
