"""Journals that were tampered with, or end anywhere: what a replay says of them, and the command."""

import json
import random
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lorrery.cli.journal import replay_journal
from tests.simulator.recorded import Lines, read_lines, replayed, run, write_lines


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    """A journal of some length, with all that may be in one."""
    path = run("fcfs continuous loads", 14, tmp_path_factory.mktemp("journal"))
    assert replayed(path).differences == []
    return read_lines(path)


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
