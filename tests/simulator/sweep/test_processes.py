"""Processes that run points, and stay alive between them."""

import os
import signal

import pytest

from lorrery.simulator.sweep import processes
from lorrery.simulator.sweep.outcome import Outcome
from lorrery.simulator.sweep.points import Point
from lorrery.simulator.sweep.processes import run_in_processes

POINTS = [Point({}, str(number)) for number in range(8)]


def say_pid(point: Point) -> Outcome:
    return Outcome(point.key, {"pid": os.getpid()})


def pids(num_processes: int) -> dict[str, int]:
    outcomes = list(run_in_processes(POINTS, num_processes, say_pid))
    assert sorted(outcome.key for outcome in outcomes) == [point.key for point in POINTS]
    return {outcome.key: int((outcome.figures or {})["pid"] or 0) for outcome in outcomes}


def test_a_process_takes_one_point_after_another() -> None:
    found = pids(2)
    assert len(set(found.values())) <= 2
    assert os.getpid() not in found.values()


def test_a_process_that_has_grown_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "MOST_GROWTH_BYTES", -(1 << 40))
    assert len(set(pids(2).values())) == len(POINTS)


def test_what_a_point_does_to_its_process_is_that_points_outcome() -> None:
    def run(point: Point) -> Outcome:
        if int(point.key) % 3 == 0:
            os._exit(7)
        return Outcome(point.key)

    errors = {outcome.key: outcome.error for outcome in run_in_processes(POINTS, 2, run)}
    assert errors == {
        point.key: "its process ended with exit code 7" if int(point.key) % 3 == 0 else "" for point in POINTS
    }


def test_a_process_that_is_killed_while_it_waits_costs_no_point() -> None:
    running = run_in_processes(POINTS, 1, say_pid)
    killed = int((next(running).figures or {})["pid"] or 0)
    os.kill(killed, signal.SIGKILL)
    os.waitid(os.P_PID, killed, os.WEXITED | os.WNOWAIT)
    rest = list(running)
    assert [outcome.key for outcome in rest if outcome.error] == []
    assert len(rest) == len(POINTS) - 1


def test_closing_it_ends_its_processes() -> None:
    running = run_in_processes(POINTS, 2, say_pid)
    pid = int((next(running).figures or {})["pid"] or 0)
    os.kill(pid, 0)
    running.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
