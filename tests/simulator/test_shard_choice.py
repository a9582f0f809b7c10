"""Routers that do not talk to one another, in virtual time: what each knows, and what follows."""

import math

import numpy as np
import pytest

import lorrery
from lorrery.simulator.cluster import REPORT_SECONDS, ShardChoice
from lorrery.simulator.loop.request import SimulatedRequest
from lorrery.vocabulary import rendezvous
from lorrery.vocabulary.endings import FinishReason
from lorrery.vocabulary.units import PS_PER_SECOND
from lorrery.worker.device.output import Ending

ADDRESSES = ["scheduler-0", "scheduler-1"]
REPORT_PS = round(REPORT_SECONDS * PS_PER_SECOND)


class Core:
    """What a choice reads of a scheduler."""

    def __init__(self, num_open: int = 0, num_workers: int = 1) -> None:
        self.num_open = num_open
        self.members = dict.fromkeys(range(num_workers))


def choices(cores: list[Core], times_ps: list[int], num_routers: int = 1, bound: float = 1.5) -> list[int]:
    choice = ShardChoice(ADDRESSES, bound, num_routers, 1.0)
    choice.cores = cores  # type: ignore[assignment]
    chosen = []
    for at_ps in times_ps:
        # The base model: its key is the handle.
        chosen.append(choice.choose(SimulatedRequest(7, 1, 1, at_ps, Ending(1, FinishReason.LENGTH))))
        cores[chosen[-1]].num_open += 1
    return chosen


def test_a_router_takes_the_others_to_send_what_it_sends() -> None:
    favourite = rendezvous.choose("7", ADDRESSES)
    alone = choices([Core(), Core()], [0] * 40)
    assert alone.count(favourite) in (29, 30, 31)  # the bound is 1.5 times a half
    together = choices([Core(), Core()], [0] * 40, num_routers=8)
    assert together[:8] == [favourite] * 8  # none has sent anything
    assert together.count(favourite) in range(24, 33)


def test_reports_tell_of_the_others() -> None:
    favourite = rendezvous.choose("7", ADDRESSES)
    chosen = choices([Core(), Core()], [*([0] * 8), REPORT_PS, REPORT_PS], num_routers=8)
    assert chosen[:8] == [favourite] * 8
    assert chosen[8] == 1 - favourite


def test_a_scheduler_without_workers_gets_nothing_while_another_has_some() -> None:
    favourite = rendezvous.choose("7", ADDRESSES)
    cores = [Core(), Core()]
    cores[favourite].members.clear()
    assert choices(cores, [0] * 5) == [1 - favourite] * 5
    cores[1 - favourite].members.clear()
    assert set(choices(cores, [0] * 5)) <= {0, 1}


@pytest.mark.parametrize("bound", [1.2, math.inf])
def test_with_a_bound_schedulers_are_evenly_loaded_and_without_it_the_adapters_decide(bound: float) -> None:
    count = 200
    requests = lorrery.Requests(
        at_seconds=np.linspace(0, 2, count),
        prompt_tokens=np.full(count, 64),
        output_tokens=np.full(count, 64),
        adapter_id=["a-0"] * count,  # all of one
    )
    settings = {
        "adapters": {"registry": [{"id": "a", "rank": 8, "count": 2}]},
        "router": {"max_shard_load": bound, "schedulers": ["s-0:1", "s-1:1"]},
    }
    result = lorrery.simulate(settings, requests, workers=2, routers=2)
    shares = sorted(float(np.mean(result.columns.worker_id == f"worker-{number}")) for number in range(2))
    if bound == math.inf:
        assert shares == [0.0, 1.0]
    else:
        assert shares[0] > 0.3
