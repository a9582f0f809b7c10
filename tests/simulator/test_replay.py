"""Whatever a live cluster does, its journal is replayed to the picosecond; and what was tampered with is found."""

import json
import random
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lorrery.chassis.version import core_is_compiled
from lorrery.cli.simulate_journal import replay_journal
from lorrery.settings import load
from lorrery.simulator.journal import read_journal
from lorrery.simulator.replay import replay
from lorrery.simulator.replay_parts import parts_of
from lorrery.simulator.replay_result import Replayed
from lorrery.tokenizer.file import SHIPPED
from tests.simulator.virtual_cluster import play
from tests.virtual.clock import virtual_time

COMMON = (
    "model='Llama-2-7B'",
    "worker.gpu='A10G'",
    "adapters.registry=[{id='a', rank=8, count=3}, {id='big', rank=64}]",
    "scheduler.max_req_total_len=400",
    "scheduler.max_req_input_len=300",
)
WAYS = {
    "req_queue slora_loop": (),
    "req_queue slora_loop strict": ("scheduler.strict=true",),
    "req_queue prefetch": ("scheduler.prefetch=true", "adapters.max_loras=2"),
    "fcfs continuous loads": ("scheduler.policy='fcfs'", "adapters.max_loras=2", "adapters.max_cpu_loras=2"),
    "fcfs blocking": ("scheduler.policy='fcfs'", "adapters.loading='blocking'", "adapters.max_loras=2"),
    "fcfs failing loads": ("scheduler.policy='fcfs'", "adapters.load_failure_ratio=0.6", "adapters.max_loras=2"),
    "mixed": ("scheduler.policy='fcfs'", "scheduler.batching='mixed'", "scheduler.max_num_seqs=5"),
    "chunked paged": (
        "scheduler.policy='fcfs'",
        "scheduler.batching='chunked'",
        "scheduler.max_num_batched_tokens=64",
        "scheduler.memory='paged'",
        "scheduler.max_total_token_num=800",
    ),
    "chunked blocks": (
        "scheduler.policy='fcfs'",
        "scheduler.batching='chunked'",
        "scheduler.max_num_batched_tokens=64",
        "scheduler.memory='paged'",
        "scheduler.max_total_token_num=800",
        "scheduler.prefix_cache={kind='blocks', share_within_plan=true}",
    ),
    "static": ("scheduler.policy='fcfs'", "scheduler.batching='static'", "scheduler.max_num_seqs=4"),
    "llm_mock": (
        "scheduler.policy='fcfs'",
        "scheduler.batching='llm_mock'",
        "scheduler.memory='none'",
        "scheduler.max_num_seqs=4",
        "worker.step_time='llm-mock'",
        "worker.output.length_model='llm-mock'",
    ),
    "vllm": ("engine='vllm'", "adapters.max_loras=2", "scheduler.max_total_token_num=900"),
    "sglang": ("engine='sglang'", "scheduler.max_num_batched_tokens=64", "scheduler.max_total_token_num=900"),
    "trtllm": ("engine='trtllm'", "scheduler.max_num_batched_tokens=64", "scheduler.max_total_token_num=900"),
    "vtc_fair": ("scheduler.policy='vtc_fair'", "scheduler.running_max_req_size=4"),
    "abort": ("scheduler.policy='abort'", "scheduler.first_token_slo_seconds=0.8", "scheduler.running_max_req_size=3"),
    "cluster": ("scheduler.policy='cluster'", "scheduler.batch_num_adapters=2"),
    "peft": ("scheduler.policy='peft'",),
    "pets": ("scheduler.policy='pets'", "scheduler.running_max_req_size=6"),
    "logits": ("scheduler.policy='fcfs'", "worker.output.mode='logits'", "worker.output.length_median=20"),
    "spelt": (
        "scheduler.policy='fcfs'",
        "scheduler.prefix_cache={kind='blocks'}",
        f"router.tokenizer='{SHIPPED}'",
        "worker.output.mode='logits'",
    ),
    "echo": ("scheduler.policy='fcfs'", "worker.output.mode='echo'", "scheduler.placement='power_of_two'"),
}


def run(way: str, seed: int, folder: Path, num_requests: int = 40) -> Path:
    """Let a random scenario happen; return its journal."""
    return run_settings(WAYS[way], f"{way} {seed}", folder, num_requests)


def run_settings(ways: tuple[str, ...], seed: str, folder: Path, num_requests: int = 40) -> Path:
    settings = load(None, [*COMMON, *ways, f"scheduler.journal='{folder / 'journal.jsonl'}'"])
    rng = random.Random(seed)
    path: list[Path] = []

    async def main() -> None:
        path.append(await play(settings, rng, num_requests=num_requests))

    with virtual_time(rng) as loop:
        loop.run_until_complete(main())
    return path[0]


def replayed(path: Path) -> Replayed:
    journal = read_journal(path)
    return replay(journal, parts_of(journal, path))


@pytest.mark.parametrize("seed", [1 if core_is_compiled() else 0])  # each core another
@pytest.mark.parametrize("way", WAYS)
def test_a_live_run_is_replayed_exactly(way: str, seed: int, tmp_path: Path) -> None:
    result = replayed(run(way, seed, tmp_path))
    assert result.differences == []
    assert result.num_requests > 0
    assert result.num_steps > 20


@pytest.mark.parametrize(("way", "seed"), [("fcfs continuous loads", 125), ("fcfs failing loads", 198)])
def test_who_began_to_wait_for_an_adapter_in_a_decision_that_left_no_trace_has_waited(
    way: str, seed: int, tmp_path: Path
) -> None:
    assert replayed(run(way, seed, tmp_path)).differences == []  # one at the end of a step, before its worker drained


Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    """A journal of some length, with all that may be in one."""
    path = run("fcfs continuous loads", 12, tmp_path_factory.mktemp("journal"))
    assert replayed(path).differences == []
    return read_lines(path)


def read_lines(path: Path) -> Lines:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(folder: Path, lines: Lines) -> Path:
    path = folder / "tampered.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def one(lines: Lines, kind: str, has: str = "type") -> tuple[int, dict[str, Any]]:
    """The line in the middle among those of a type that have something, and its place."""
    found = [(place, line) for place, line in enumerate(lines) if line.get("type") == kind and line.get(has)]
    return found[len(found) // 2]


def shorten_a_step(lines: Lines) -> int:
    place, line = one(lines, "steps")
    line["durations_ps"][0] -= 1
    return place


def move_a_plan(lines: Lines) -> int:
    place, line = one(lines, "plan")
    line["at_ps"] += 1
    return place


def remove_a_finish(lines: Lines) -> int:
    place, line = next(
        (place, line)
        for place, line in enumerate(lines)
        if line.get("type") == "steps" and any("finished" in said for _, said in line.get("events", ()))
    )
    for _, said in line["events"]:
        said.pop("finished", None)
    return place


def change_a_token(lines: Lines) -> int:
    place, line = one(lines, "steps")
    line["checksums"][-1] ^= 1
    return place


def change_what_is_cached(lines: Lines) -> int:
    place, line = one(lines, "plan", "admitted")
    line["admitted"][0][1] += 1
    return place


def drop_a_join(lines: Lines) -> int:
    place, line = one(lines, "plan", "joins")
    del line["joins"][0]
    return place


def drop_the_last_steps(lines: Lines) -> None:
    del lines[max(place for place, line in enumerate(lines) if line.get("type") == "steps")]


def add_a_step(lines: Lines) -> int:
    place = max(place for place, line in enumerate(lines) if line.get("type") == "steps")
    lines[place]["durations_ps"].append(10**9)
    lines[place]["checksums"].append(1)
    return place


def forget_that_inputs_were_late(lines: Lines) -> None:
    lines[:] = [line for line in lines if line.get("type") != "late"]


def lengthen_a_request(lines: Lines) -> None:
    for line in lines:  # one alone may have been cancelled before it mattered
        if line.get("type") == "request":
            line["sampling"] = {"seed": line["sampling"]["seed"], "max_new_tokens": 300, "ignore_eos": True}


def shorten_the_last_gap_but_one(lines: Lines) -> None:
    gaps = [line for line in lines if line.get("type") == "steps" and line.get("gaps_ps")]
    gaps[-2]["gaps_ps"][0][1] -= 1


def name_a_request_that_is_not_there(lines: Lines) -> int:
    place, line = one(lines, "placed")
    line["handle"] = 10_000
    return place


@pytest.mark.parametrize(
    "tamper",
    [
        shorten_a_step,
        move_a_plan,
        remove_a_finish,
        change_a_token,
        change_what_is_cached,
        drop_a_join,
        drop_the_last_steps,
        add_a_step,
        forget_that_inputs_were_late,
        lengthen_a_request,
        shorten_the_last_gap_but_one,
        name_a_request_that_is_not_there,
    ],
    ids=lambda tamper: tamper.__name__,
)
def test_what_was_tampered_with_is_found(
    tamper: Callable[[Lines], int | None], recorded: Lines, tmp_path: Path
) -> None:
    lines = json.loads(json.dumps(recorded))
    place = tamper(lines)
    differences = replayed(write_lines(tmp_path, lines)).differences
    assert differences
    assert place is None or differences[0][0] == place + 1


@pytest.mark.parametrize("seed", [19, 26, 27])
def test_a_journal_that_ends_anywhere_is_equal_up_to_there(seed: int, tmp_path: Path) -> None:
    whole = read_lines(run("fcfs continuous loads", seed, tmp_path))  # 19 and 26: workers whose clocks are ahead
    rng = random.Random(1)
    for _ in range(12):
        lines = whole[: rng.randint(2, len(whole))]
        assert replayed(write_lines(tmp_path, lines)).differences == []


def move_a_request_to_another_worker(lines: Lines) -> int:
    place, line = one(lines, "placed", "candidates")
    line["worker"] = 1 - line["worker"]
    return place


def change_what_a_placement_read(lines: Lines) -> int:
    place, line = one(lines, "placed", "candidates")
    chosen = next(worker["hello"]["worker_id"] for worker in lines if worker.get("worker") == line["worker"])
    line["candidates"][chosen]["load"] += 100
    return place


def forget_what_a_placement_read(lines: Lines) -> int:
    place, line = one(lines, "placed", "candidates")
    for figures in line["candidates"].values():
        figures.clear()
    return place


def leave_a_candidate_out(lines: Lines) -> int:
    place, line = one(lines, "placed", "candidates")
    line["candidates"].popitem()
    return place


def leave_all_candidates_out(lines: Lines) -> int:
    place, line = one(lines, "placed", "candidates")
    del line["candidates"]
    return place


@pytest.mark.parametrize(
    "tamper",
    [
        move_a_request_to_another_worker,
        change_what_a_placement_read,
        forget_what_a_placement_read,
        leave_a_candidate_out,
        leave_all_candidates_out,
    ],
    ids=lambda tamper: tamper.__name__,
)
def test_a_placement_that_does_not_follow_from_what_was_read_is_told_by_its_line(
    tamper: Callable[[Lines], int], recorded: Lines, tmp_path: Path
) -> None:
    lines = json.loads(json.dumps(recorded))
    place = tamper(lines)
    (line, what), *_ = replayed(write_lines(tmp_path, lines)).differences
    assert line == place + 1
    assert what.startswith("placed: ")


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


def test_a_journal_of_format_1_is_replayed_exactly_and_says_itself_where_requests_went() -> None:
    result = replayed(Path(__file__).parent / "journals" / "format_1.jsonl")
    assert result.differences == []
    counts = result.num_requests, result.num_workers, result.num_lost, result.num_cancels
    assert counts == (46, 2, 2, 13)
    assert (result.num_plans, result.num_steps, result.num_tokens) == (75, 440, 2315)
    assert (result.num_placed, result.num_derived) == (54, 0)


def test_a_journal_of_format_2_is_replayed_exactly_with_adapters_that_have_no_versions() -> None:
    result = replayed(Path(__file__).parent / "journals" / "format_2.jsonl")
    assert result.differences == []
    counts = result.num_requests, result.num_workers, result.num_lost, result.num_cancels
    assert counts == (40, 3, 3, 4)
    assert (result.num_plans, result.num_steps, result.num_tokens) == (65, 247, 1210)
    assert (result.num_placed, result.num_derived) == (40, 40)


def printed(path: Path) -> tuple[int, str]:
    out = StringIO()
    code = replay_journal(path, Console(file=out, width=1000))
    return code, out.getvalue()


def test_the_command_says_what_it_compared(recorded: Lines, tmp_path: Path) -> None:
    code, text = printed(write_lines(tmp_path, recorded))
    assert code == 0
    assert "compared 40 requests, " in text
    assert " late; " in text
    assert text.splitlines()[-1] == "equal: every batch, every time and every token"


def test_the_command_shows_the_first_difference_with_its_line(recorded: Lines, tmp_path: Path) -> None:
    lines = json.loads(json.dumps(recorded))
    place = shorten_a_step(lines)
    code, text = printed(write_lines(tmp_path, lines))
    assert code == 1
    assert f"tampered.jsonl:{place + 1}: step: end_ps is " in text
    assert "equal:" not in text


def test_the_command_says_that_a_journal_has_no_end_or_a_line_is_cut(recorded: Lines, tmp_path: Path) -> None:
    path = write_lines(tmp_path, recorded[:-1])
    with path.open("a") as file:
        file.write('{"type":"en')
    code, text = printed(path)
    assert code == 0
    assert f"{path}:{len(recorded)}: the line is cut off and is left out" in text
    assert "has no end: the scheduler runs, or was killed" in text


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
    path = run_settings((*WAYS["chunked paged"], "scheduler.max_num_seqs=4"), "moves 12", tmp_path, num_requests=60)
    moved = {line["handle"] for line in read_lines(path) if "moved_from" in line}
    assert moved & {handle for line in read_lines(path) for handle, _ in line.get("preempted", ())}
    assert replayed(path).differences == []
