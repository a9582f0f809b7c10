"""`lorrery validate policy --part placement`: our placements keep the contract, and what does not is told in words."""

import random
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
from typer.testing import CliRunner

from lorrery.cli.validate import app
from lorrery.scheduler.core.placements.base import Candidate, Choice, least_loaded
from lorrery.scheduler.core.placements.table import PLACEMENTS
from lorrery.validation.policy import drive
from lorrery.validation.policy.placement import Worker, check_placement

Place = Callable[[Any, Sequence[Candidate]], Any]


def fault_of(place: Place, seconds: float = 0.0) -> str:
    class Own:
        def __init__(self, rng: object) -> None: ...

        def place(self, sequence: Any, candidates: Sequence[Candidate]) -> Any:
            return place(sequence, candidates)

    return check_placement(Own, seed=1, seconds=seconds).fault


@pytest.mark.parametrize("name", PLACEMENTS)
def test_our_placements_keep_the_contract(name: str):
    verdict = check_placement(PLACEMENTS[name], seed=3, seconds=0.05)
    assert (verdict.fault, verdict.num_cases > 0) == ("", True)


def test_a_placement_that_does_not_return_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(drive, "TICK_SECONDS", 0.02)

    def loop(_sequence: Any, _candidates: Sequence[Candidate]) -> Choice:
        while True:
            pass

    fault = fault_of(loop)
    assert fault.startswith("`place` did not return within 0.2 s, and was in test_placement.py, line ")


def test_what_is_no_exception_is_a_fault_too():
    def close(_sequence: Any, _candidates: Sequence[Candidate]) -> Choice:
        raise GeneratorExit("gone")

    assert fault_of(close).startswith("`place` raised GeneratorExit: gone (test_placement.py, line ")


def test_faults_are_told_in_words():
    kept: list[Candidate] = []
    numbers, chance = count(), random.Random(0)

    def remember(_sequence: Any, candidates: Sequence[Candidate]) -> Choice:
        kept.append(candidates[0])
        return Choice(kept[0], "the first that there ever was")

    def fill(_sequence: Any, candidates: Sequence[Candidate]) -> Choice:
        assert isinstance(candidates[0], Worker)
        candidates[0].figures["num_waiting"] += 1
        return Choice(candidates[0], "first")

    def rename(sequence: Any, candidates: Sequence[Candidate]) -> Choice:
        sequence.handle = 99
        return Choice(candidates[0], "first")

    def take_out(_sequence: Any, candidates: Any) -> Choice:
        return Choice(candidates.pop(), "last")

    def by_chance(_sequence: Any, candidates: Sequence[Candidate]) -> Choice:
        return Choice(chance.choice(list(candidates)), f"drawn {next(numbers)}")

    assert "it must be a Choice(candidate, why) of one of worker-" in fault_of(
        lambda _sequence, candidates: candidates[0]
    )
    assert "the reason of the Choice is None" in fault_of(lambda _, candidates: Choice(candidates[0], None))  # type: ignore[arg-type]
    assert "`place` raised ZeroDivisionError" in fault_of(lambda _, candidates: 1 // 0)
    assert "`place` changed a candidate; it may only look" in fault_of(fill)
    assert "`place` changed the request's handle; it may only look" in fault_of(rename)
    assert "`place` raised AttributeError: 'tuple' object has no attribute 'pop'" in fault_of(take_out)
    assert "`place` answered None; it must be a Choice(candidate, why) of one of worker-" in fault_of(lambda *_: None)
    assert "is no candidate; there are worker-" in fault_of(remember, seconds=0.5)
    assert "when all was played again with the same generator" in fault_of(by_chance, seconds=0.5)
    told = "waiting_tokens is kept only for a placement that predicts; give its class `predicts = True`"
    assert told in fault_of(lambda _, candidates: Choice(min(candidates, key=lambda one: one.waiting_tokens), "least"))
    assert fault_of(lambda _, candidates: Choice(least_loaded(candidates), "least")) == ""


def test_the_command_checks_placements_and_ways_to_batch():
    def run(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["policy", *arguments, "--seconds", "0"])
        return result.exit_code, result.output + str(result.exception)

    assert run("round_robin", "--part", "placement")[1].startswith("round_robin: trying it for 0 s")
    assert run("chunked", "--part", "batching")[0] == 0
    assert "--part queue: it must be one of policy, batching, placement" in run("fcfs", "--part", "queue")[1]
    assert "scheduler.placement" in run("json:JSONDecoder", "--part", "placement")[1]
