"""The growth bench's loads run to their ends, and its figures are shown."""

from collections.abc import Callable
from io import StringIO

import pytest
from rich.console import Console

from lab.bench import sim_growth, sim_tables
from lab.bench.sim_growth import SERIES, Growth, Point
from lab.bench.sim_scenarios import Scenario
from lab.bench.sim_speed import simulate


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim_growth, "PROMPT_REQUESTS", 40)
    monkeypatch.setattr(sim_growth, "WORKER_REQUESTS", 80)


@pytest.mark.parametrize(("name", "size"), [("requests", 60), ("prompt tokens", 5_000), *[
    (name, 3) for name in SERIES if name.startswith("workers")
]])  # fmt: skip
def test_every_request_of_each_series_finishes(name: str, size: int) -> None:
    make: Callable[[int], Scenario] = SERIES[name]
    scenario = make(size)
    assert simulate(scenario).num_finished == len(scenario.columns)


def test_half_of_a_prompt_is_shared_with_some_others() -> None:
    hash_ids = sim_growth.long_prompts(5_000).columns.hash_ids
    assert hash_ids is not None
    starts = {tuple(ids[:5]) for ids in hash_ids if ids is not None}
    assert 1 < len(starts) <= sim_growth.SHARED_HALVES
    assert len({tuple(ids[5:]) for ids in hash_ids if ids is not None}) == len(hash_ids)


def test_growth_and_memory_are_shown_beside_their_aims() -> None:
    points = [Point(10, [10.0, 12.0, 14.0], [80.0]), Point(1_000, [24.0], [90.0])]
    growth = Growth("interpreted", {"workers.least_loaded": points}, {"a": 250.0, "b": 310.0, "c": 90.0}, 0.98)
    assert growth.ratio("workers.least_loaded") == 2
    shown = Console(file=StringIO(), width=120)
    shown.print(sim_tables.sim_growth(growth))
    text = shown.file.getvalue()  # type: ignore[attr-defined]
    assert "2.00" in text
    assert "at most 300" in text
    assert "0.98" in text
