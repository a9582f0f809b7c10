"""Faults on request under the virtual clock: what each does to whom, to the picosecond, and nothing to anybody else."""

import math
from typing import Any

import numpy as np
import pytest

import lorrery
from lorrery.service.errors import SettingsError
from lorrery.service.faults.kinds import parse_fault
from lorrery.service.faults.rules import FaultRules

SETTINGS: dict[str, Any] = {"model": "Llama-3-8B", "worker": {"gpu": "H100-SXM"}, "scheduler": {"policy": "fcfs"}}
REQUESTS = lorrery.Requests(
    at_seconds=[0, 10, 20, 30], prompt_tokens=[8] * 4, output_tokens=[50] * 4, tenant_id=["acme", "b", "b", "acme"]
)


def columns(*faults: str, **options: Any) -> Any:
    result = lorrery.simulate(SETTINGS, REQUESTS, workers=1, faults=faults, **options)
    return result.columns


PLAIN = columns()


def test_rules_count_those_that_they_fit_and_draw_the_same_each_time() -> None:
    def met(*texts: str) -> list[list[int]]:
        rules = FaultRules(map(parse_fault, texts))
        chosen = [rules.choose("b" if number % 2 else "a", "", number) for number in range(200)]
        return [[number for number, faults in enumerate(chosen) if fault in faults] for fault in rules.faults]

    assert met("delay,seconds=1,first=2", "delay,seconds=2,first=3,tenant=b") == [[0, 1], [1, 3, 5]]
    share, other, same = met(*(f"delay,seconds={n},share=0.25,seed={seed}" for n, seed in ((1, 7), (2, 8), (3, 7))))
    assert 30 <= len(share) <= 70
    assert share != other
    assert share != same  # each rule draws for itself
    assert met("delay,seconds=1,share=0.25,seed=7") == [share]
    assert met("delay,seconds=1,share=0.25,seed=7,first=10") == [share[:10]]  # the first that are drawn
    assert [len(some) for some in met("refuse,first=5", "delay,seconds=1,first=5")] == [5, 5]
    assert met("refuse,first=5", "delay,seconds=1,first=5")[1] == [5, 6, 7, 8, 9]  # who is refused meets nothing else


def test_a_refusal_keeps_a_request_from_the_scheduler_and_changes_no_other() -> None:
    found = columns("refuse,first=1,status=RESOURCE_EXHAUSTED")
    assert found.status.tolist() == ["RESOURCE_EXHAUSTED", "OK", "OK", "OK"]
    assert found.output_tokens.tolist() == [0, 50, 50, 50]
    assert found.end_seconds[0] == 0
    assert np.array_equal(found.end_seconds[1:], PLAIN.end_seconds[1:])


def test_a_cut_ends_a_stream_when_its_token_has_come() -> None:
    found = columns("cut,after=5,tenant=acme,status=DATA_LOSS")
    assert found.status.tolist() == ["DATA_LOSS", "OK", "OK", "DATA_LOSS"]
    assert found.output_tokens.tolist() == [5, 50, 50, 5]
    assert found.ttft_seconds.tolist() == PLAIN.ttft_seconds.tolist()
    assert (found.end_seconds < PLAIN.end_seconds)[[0, 3]].all()
    assert columns("cut,after=51").status.tolist() == ["OK"] * 4
    without = columns("cut,after=0")
    assert without.output_tokens.tolist() == [0] * 4
    assert all(map(math.isnan, without.ttft_seconds))


@pytest.mark.parametrize("after", [1, 5, 49])
def test_a_stall_holds_back_what_comes_after_its_token(after: int) -> None:
    at_token = columns(f"cut,after={after},at=10,for=1").end_seconds[1]
    for options in ({}, {"one_step": True}):
        found = columns(f"stall,after={after},seconds=3,at=10,for=1", **options)
        assert found.status.tolist() == ["OK"] * 4
        assert found.end_seconds[1] == pytest.approx(at_token + 3, abs=1e-12)
        assert found.end_seconds[[0, 2, 3]].tolist() == PLAIN.end_seconds[[0, 2, 3]].tolist()
        assert found.ttft_seconds.tolist() == PLAIN.ttft_seconds.tolist()
        for phase in ("queue_seconds", "prefill_seconds", "decode_seconds"):  # the scheduler's, which had ended it
            assert getattr(found, phase).tolist() == getattr(PLAIN, phase).tolist()


def test_stalls_that_are_over_before_the_output_is_change_nothing_and_two_add_up() -> None:
    assert columns("stall,after=2,seconds=0.01").end_seconds.tolist() == PLAIN.end_seconds.tolist()
    assert columns("stall,after=50,seconds=9").end_seconds.tolist() == PLAIN.end_seconds.tolist()
    at_token = columns("cut,after=5,first=1").end_seconds[0]
    two = columns("stall,after=5,seconds=1,first=1", "stall,after=6,seconds=2,first=1")
    assert two.end_seconds[0] == pytest.approx(at_token + 3, abs=1e-12)


def test_a_delay_is_the_clients_wait_and_not_the_schedulers_queue() -> None:
    found = columns("delay,seconds=2,first=1")
    assert found.arrival_seconds.tolist() == [0, 10, 20, 30]
    assert found.ttft_seconds[0] == pytest.approx(PLAIN.ttft_seconds[0] + 2, abs=1e-12)
    assert found.queue_seconds.tolist() == PLAIN.queue_seconds.tolist()


def test_a_client_that_gives_up_sees_its_deadline_whatever_holds_it_up() -> None:
    late = columns("delay,seconds=9,first=1")
    assert late.status.tolist() == ["OK"] * 4
    result = lorrery.simulate(
        SETTINGS,
        lorrery.LoadOptions(timeout=5.0),
        requests=REQUESTS,
        workers=1,
        faults=["delay,seconds=9,first=1", "stall,after=5,seconds=30,tenant=b"],
    )
    assert result.columns.status.tolist() == ["DEADLINE_EXCEEDED"] * 3 + ["OK"]
    assert result.columns.end_seconds[:3].tolist() == [5, 15, 25]


def test_a_worker_that_is_lost_while_a_stream_is_to_stall_moves_its_token() -> None:
    requests = lorrery.Requests([0.0], [8], [400])
    loss = "worker_loss,at=1,worker=worker-0,for=5"
    cut, stalled = (
        lorrery.simulate(SETTINGS, requests, workers=1, faults=[loss, fault]).columns
        for fault in ("cut,after=300", "stall,after=300,seconds=60")
    )
    assert cut.num_requeues.tolist() == stalled.num_requeues.tolist() == [1]
    assert stalled.end_seconds[0] == pytest.approx(cut.end_seconds[0] + 60, abs=1e-12)


def test_the_adapters_of_faults_of_loads_must_be_there() -> None:
    with pytest.raises(SettingsError, match="no such adapter"):
        columns("adapter_load_failure,at=0,adapter=ghost")
