"""`lorrery validate policy` finds what is wrong with a queue, and says it so that its author can mend it."""

import signal
import time
from collections.abc import Sequence as Many
from dataclasses import fields

import pytest
from typer.testing import CliRunner

from lorrery.cli.validate import app
from lorrery.scheduler.core.batching.whole_prompts import Continuous
from lorrery.scheduler.core.policies import QUEUES
from lorrery.scheduler.core.queues.base import ListedQueue, steps_until_admissible
from lorrery.scheduler.core.queues.fifo import Fifo
from lorrery.scheduler.core.sequence import Sequence
from lorrery.validation.policy import drive
from tests.simulator.faulty_queues import Exits, GeneratorExits

NEEDS = {
    "cluster": ["--set", "scheduler.batch_num_adapters=2"],
    "fcfs_tail": ["--set", "scheduler.memory=estimated"],
    "lpm": ["--set", "scheduler.memory=estimated", "--set", "scheduler.prefix_cache.kind=radix"],
}


def check(name: str, *arguments: str, seconds: float = 30.0, exit_code: int = 1) -> str:
    result = CliRunner().invoke(app, ["policy", name, "--seconds", str(seconds), *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == exit_code, result.output
    return result.output


def own(queue: type, *arguments: str) -> str:
    return check(f"{queue.__module__}:{queue.__name__}", *arguments)


class ShortestFirst(ListedQueue):
    def __init__(self, *, longest: bool = False) -> None:
        super().__init__()
        self.longest = longest

    def order(self, at_ps: int) -> Many:
        return sorted(self, key=lambda waiting: waiting.input_tokens, reverse=self.longest)

    def admit(self, admission, running, at_ps):
        self._blocked = None
        for sequence in self.order(at_ps):
            if not admission.admit(sequence):
                self._blocked = admission.refused
                break
        self._waiting.remove_all(admission.admitted)
        return []


class Gated(ShortestFirst):
    """Lets nobody in beside others who has not waited for half a second, and forgets that time passes."""

    def order(self, at_ps: int) -> Many:
        return [one for one in self if not self.busy or at_ps - one.arrived_ps >= 5 * 10**11]

    def admit(self, admission, running, at_ps):
        self.busy = len(running) > 0
        return super().admit(admission, running, at_ps)

    def holds_for(self, running, memory, limit):
        return steps_until_admissible(self._blocked, running, memory, limit)


class Deaf(ShortestFirst):
    def holds_for(self, running, memory, limit):
        return steps_until_admissible(self._blocked, running, memory, limit)

    def arrivals_matter(self):
        return self.at_rest()


class KeepsAdmitted(Fifo):
    def admit(self, admission, running, at_ps):
        for sequence in self:
            if not admission.admit(sequence):
                break
        return []


class Loses(Fifo):
    def append(self, sequence, at_ps):
        if sequence.input_tokens % 5:
            super().append(sequence, at_ps)


class NeverWakes(ListedQueue):
    def admit(self, admission, running, at_ps):
        for sequence in list(self):
            if at_ps - sequence.arrived_ps >= 10**11 and admission.admit(sequence):
                self._waiting.remove(sequence.handle)
        return []


class ForgetsCancels(Fifo):
    def cancel(self, handle):
        return None


class ClearsHalf(Fifo):
    def clear(self):
        return super().clear()[::2]


class Raises(Fifo):
    def admit(self, admission, running, at_ps):
        raise KeyError("my table")


class PromisesNothing(Fifo):
    def holds_for(self, running, memory, limit):
        return 0


class WakesEveryMillisecond(ShortestFirst):
    def wakes_at_ps(self, at_ps):
        return at_ps + 10**9


class AnswersNone(Fifo):
    def admit(self, admission, running, at_ps):
        super().admit(admission, running, at_ps)


class RestsInWords(Fifo):
    def at_rest(self):
        return "yes" if super().at_rest() else ""


class Draws(ShortestFirst):
    num_made = 0

    def __init__(self) -> None:
        super().__init__()
        Draws.num_made += 1
        self.longest = Draws.num_made % 2 == 0


class Writes(ShortestFirst):
    """Changes a field of each request, of those that run if it is asked to."""

    def __init__(self, *, field: str, value: object, running: bool = False) -> None:
        super().__init__()
        self.field, self.value, self.running = field, value, running

    def admit(self, admission, running, at_ps):
        for sequence in (*running, *running.prefilling.values()) if self.running else self:
            setattr(sequence, self.field, self.value)
        return super().admit(admission, running, at_ps)


class WritesLater(ShortestFirst):
    def holds_for(self, running, memory, limit):
        for sequence in running:
            sequence.max_new_tokens += 1
        return 1


class Computes(Continuous):
    """Takes all that runs as computed a token earlier."""

    def choose(self, context, at_ps):
        for sequence in context.running:
            sequence.base_step -= 1
        return super().choose(context, at_ps)


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize(
    "field", [field.name for field in fields(Sequence) if field.name not in ("adapter", "content", "load_end")]
)
def test_a_change_to_any_field_of_a_request_is_found_where_it_happens(field: str, running: bool) -> None:
    odd = {"tenant_id": '"other"', "worker": '"other"', "aborted": "true", "dropped": "true"}
    value = odd.get(field, "[1, 2, 3]" if field.endswith("token_ids") else "987654321")
    options = (f"field={field}", f"value={value}", f"running={str(running).lower()}")
    output = own(Writes, *(part for option in options for part in ("--set", f"scheduler.policy_options.{option}")))
    assert f" `admit` changed {field} of request " in output
    assert "; it must not: a policy may only read the requests that it is given" in output


@pytest.mark.parametrize(
    ("policy", "told", "part"),
    [
        (WritesLater, "`holds_for` changed max_new_tokens of request", "policy"),
        (Computes, "`choose` changed base_step of request", "batching"),
    ],
)
def test_a_change_in_another_method_is_found_there(policy: type, told: str, part: str) -> None:
    assert told in own(policy, "--part", part)


@pytest.mark.parametrize(
    ("queue", "told"),
    [
        (
            Gated,
            ["asked before every step the queue let request", "; asked only when it said, it", "`holds_for` had"],
        ),
        (Deaf, ["asked before every step the queue let request", "`arrivals_matter` had promised at"]),
        (
            KeepsAdmitted,
            ["was admitted and still waits; `admit` must take out of the queue"],
        ),
        (Loses, ["is lost: it was given to `append`, and neither waits nor was admitted"]),
        (NeverWakes, ["would wait for ever: nothing runs, `admit` lets nobody in, and `wakes_at_ps` names no time"]),
        (ForgetsCancels, ["was cancelled, and `cancel(", "did not return it"]),
        (ClearsHalf, ["the worker was lost, and request", "did not come back; `clear` must return all that wait"]),
        (Raises, ["raised KeyError: 'my table' (test_check.py, line "]),
        (Exits, ["raised SystemExit: 0 (faulty_queues.py, line "]),
        (GeneratorExits, ["raised GeneratorExit: gone (faulty_queues.py, line "]),
        (PromisesNothing, ["`holds_for` answered 0; it must be a whole number from 1 to limit, here "]),
        (AnswersNone, ["`admit` answered None; it must be a list of requests that it dropped, [] for none"]),
        (RestsInWords, ["`at_rest` answered '", "'; it must be True or False"]),
        (Draws, ["made twice alike it decides differently"]),
    ],
)
def test_a_fault_is_found_and_told_in_the_words_of_the_author(queue: type, told: list[str]) -> None:
    output = own(queue)
    for text in told:
        assert text in output
    assert "seed 0" in output.splitlines()[-1]


class Loops(ShortestFirst):
    """Never returns once some have waited, from a method of its own that `admit` calls."""

    def order(self, at_ps: int) -> Many:
        while at_ps:
            time.monotonic()
        return list(self)


class LoopsInCancel(ShortestFirst):
    def cancel(self, handle):
        while True:
            pass


class IsSlow(ShortestFirst):
    """Takes two ticks a call, and many calls a case."""

    def admit(self, admission, running, at_ps):
        end = time.monotonic() + 0.02
        while time.monotonic() < end:
            pass
        return super().admit(admission, running, at_ps)


@pytest.mark.parametrize(("queue", "method"), [(Loops, "admit"), (LoopsInCancel, "cancel")])
def test_a_call_that_does_not_return_is_named(queue: type, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive, "TICK_SECONDS", 0.02)
    before = signal.getsignal(signal.SIGALRM)
    output = own(queue)
    assert f": `{method}` did not return within 0.2 s, and was in test_check.py, line " in output
    assert "seed 0" in output.splitlines()[-1]
    assert signal.getsignal(signal.SIGALRM) is before


def test_a_slow_queue_is_no_stuck_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive, "TICK_SECONDS", 0.01)
    assert "1 cases, no fault" in check(f"{__name__}:IsSlow", seconds=0.0, exit_code=0)


def test_the_same_seed_shows_the_same_fault() -> None:
    assert own(Gated, "--seed", "3") == own(Gated, "--seed", "3")


def test_a_queue_without_fault_passes_and_is_told_that_it_is_asked_before_every_step() -> None:
    output = check(
        f"{__name__}:ShortestFirst", "--set", "scheduler.policy_options.longest=true", seconds=2.0, exit_code=0
    )
    assert "no fault" in output
    assert "asked before every step: right, and slower" in output


def test_a_rule_that_looks_every_so_often_passes() -> None:
    assert "no fault" in check(f"{__name__}:WakesEveryMillisecond", seconds=0.5, exit_code=0)


@pytest.mark.parametrize("policy", QUEUES)
def test_every_policy_of_ours_passes(policy: str) -> None:
    output = check(policy, *NEEDS.get(policy, []), seconds=1.0, exit_code=0)
    assert "no fault" in output
    assert "asked before" not in output
