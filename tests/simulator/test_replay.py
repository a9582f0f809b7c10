"""Whatever a live cluster does, its journal is replayed to the picosecond."""

import json
from pathlib import Path

import pytest

from lorrery.service.installed import core_is_compiled
from tests.simulator.recorded import WAYS, read_lines, replayed, run, run_live, run_settings, write_lines


@pytest.mark.parametrize("seed", [1 if core_is_compiled() else 0])  # each core another
@pytest.mark.parametrize("way", WAYS)
def test_a_live_run_is_replayed_exactly(way: str, seed: int, tmp_path: Path) -> None:
    path, adapters = run_live(WAYS[way], f"{way} {seed}", tmp_path)
    result = replayed(path)
    assert result.differences == []
    assert result.tally.by_adapter == adapters
    assert result.num_requests > 0
    assert result.num_steps > 20


@pytest.mark.parametrize("way", WAYS)
def test_cancels_that_finish_and_requests_that_skip_the_cache_are_replayed_exactly(way: str, tmp_path: Path) -> None:
    path, _ = run_live(WAYS[way], f"{way} 4", tmp_path, cuts=True)
    lines = read_lines(path)
    assert any(line.get("cause") == "stop_text" for line in lines)
    assert any(line.get("skips_prefix_cache") for line in lines)
    assert replayed(path).differences == []


def test_a_load_that_had_ended_before_its_worker_was_lost_counts_though_no_decision_followed(tmp_path: Path) -> None:
    path, adapters = run_live(WAYS["req_queue prefetch"], "req_queue prefetch 89", tmp_path)
    assert replayed(path).tally.by_adapter == adapters


@pytest.mark.parametrize(("way", "seed"), [("fcfs continuous loads", 125), ("fcfs failing loads", 198)])
def test_who_began_to_wait_for_an_adapter_in_a_decision_that_left_no_trace_has_waited(
    way: str, seed: int, tmp_path: Path
) -> None:
    assert replayed(run(way, seed, tmp_path)).differences == []  # one at the end of a step, before its worker drained


@pytest.mark.parametrize(
    ("placement", "more"),
    [
        ("round_robin", ()),
        ("adapter_hash", ()),
        ("adapter_shards", ()),
        ("power_of_two", ()),
        ("weighted", ("scheduler.memory='paged'", "scheduler.prefix_cache={kind='blocks'}")),
        ("prefix_match", ("scheduler.memory='paged'", "scheduler.prefix_cache={kind='blocks'}")),
    ],
)
def test_every_placement_is_derived_from_what_it_read(placement: str, more: tuple[str, ...], tmp_path: Path) -> None:
    ways = ("scheduler.policy='fcfs'", f"scheduler.placement='{placement}'", "adapters.max_loras=2", *more)
    result = replayed(run_settings(ways, placement, tmp_path))
    assert result.differences == []


def test_what_a_placement_refuses_by_raising_is_derived_too(tmp_path: Path) -> None:
    ways = ("scheduler.policy='fcfs'", "scheduler.placement='tests.simulator.raising_placement:RaisesNowAndThen'")
    path = run_settings(ways, "raises", tmp_path)
    result = replayed(path)
    assert result.differences == []
    lines = read_lines(path)
    raised = [number for number, line in enumerate(lines) if line.get("type") == "refused" and "candidates" in line]
    assert len(raised) >= 4
    lines[raised[1]]["candidates"].popitem()
    (line, what), *_ = replayed(write_lines(tmp_path, lines)).differences
    assert line == raised[1] + 1
    assert what.startswith("refused: ")
    assert result.num_derived > 10


@pytest.mark.parametrize(
    ("version", "counts", "ran", "placed"),
    [
        (1, (46, 2, 2, 13), (75, 440, 2315), (54, 0)),  # it says itself where requests went
        (2, (40, 3, 3, 4), (65, 247, 1210), (40, 40)),  # its adapters have no versions
    ],
)
def test_a_journal_of_an_earlier_format_is_replayed_exactly(
    version: int, counts: tuple[int, ...], ran: tuple[int, ...], placed: tuple[int, ...]
) -> None:
    result = replayed(Path(__file__).parent / "journals" / f"format_{version}.jsonl")
    assert result.differences == []
    assert (result.num_requests, result.num_workers, result.num_lost, result.num_cancels) == counts
    assert (result.num_plans, result.num_steps, result.num_tokens) == ran
    assert (result.num_placed, result.num_derived) == placed


@pytest.mark.parametrize("placement", ["least_loaded", "power_of_two"])
def test_what_moves_between_workers_is_replayed_and_stands_in_the_journal(placement: str, tmp_path: Path) -> None:
    ways = ("scheduler.policy='fcfs'", "scheduler.max_num_seqs=2", f"scheduler.placement='{placement}'")
    num_recalled = num_moved = 0
    for seed in range(4):
        folder = tmp_path / str(seed)
        folder.mkdir()
        path = run_settings(ways, f"moves {placement} {seed}", folder, num_requests=60)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        num_recalled += sum(line.get("type") == "recall" for line in lines)
        moved = [line for line in lines if "moved_from" in line]
        num_moved += len(moved)
        workers = {line["worker"]: line["hello"]["worker_id"] for line in lines if line.get("type") == "attached"}
        assert all(workers[line["worker"]] != line["moved_from"] for line in moved)
        assert replayed(path).differences == []
    assert num_recalled >= num_moved > 10


def test_what_was_preempted_before_it_moved_is_replayed(tmp_path: Path) -> None:
    path = run_settings((*WAYS["chunked paged"], "scheduler.max_num_seqs=4"), "moves 12", tmp_path, num_requests=100)
    moved = {line["handle"] for line in read_lines(path) if "moved_from" in line}
    assert moved & {handle for line in read_lines(path) for handle, _ in line.get("preempted", ())}
    assert replayed(path).differences == []
