"""What a placement from outside changes is put back, and it is told by name; workers are not lost by it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lorrery.loadgen.workload.request import WorkloadRequest
from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.checked.placement import CHECK_IT, FIELDS, CheckedPlacement
from lorrery.scheduler.core.placements.base import Choice
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.simulator.loop.build import build_requests, build_workers
from lorrery.simulator.loop.engine import Simulation
from lorrery.simulator.loop.request import SimulatedRequest
from lorrery.worker.device.constant import LlmMock

NUM_REQUESTS = 8
Place = Callable[[Any, Any], Any]


class Own:
    """Places by a function, but every second request well."""

    def __init__(self, place: Place) -> None:
        self._place, self._num = place, 0

    def place(self, sequence: Any, candidates: Any) -> Any:
        self._num += 1
        return self._place(sequence, candidates) if self._num % 2 else Choice(candidates[-1], "the last")


def run(place: Place, num_workers: int) -> list[SimulatedRequest]:
    settings = ReplicaSettings("fcfs", 1_000, 400, max_num_seqs=2, max_num_batched_tokens=500)
    simulation = Simulation(
        build_workers(num_workers, settings, LlmMock(), build_replica), CheckedPlacement(Own(place))
    )
    workload = [WorkloadRequest(n, n / 100, 50, 20) for n in range(NUM_REQUESTS)]
    return sorted(simulation.run(build_requests(workload, "", {})), key=lambda request: request.handle)


def changing(**values: object) -> Place:
    def place(sequence: Any, candidates: Any) -> Choice:
        for name, value in values.items():
            setattr(sequence, name, value)
        return Choice(candidates[0], "first")

    return place


@pytest.mark.parametrize("num_workers", [2, 40])
@pytest.mark.parametrize(
    ("place", "told"),
    [
        (changing(max_new_tokens=1, input_tokens=5), "`place` changed the request's max_new_tokens, input_tokens; it"),
        (changing(handle=7), "ValueError: `place` changed the request's handle; it may only look"),
        (changing(budget_tokens=-5), "ValueError: `place` changed the request's budget_tokens; it may only look"),
        (changing(adapter=Adapter("a", 8)), "ValueError: `place` changed the request's adapter; it may only look"),
        (changing(output_token_ids=np.arange(3)), "ValueError: `place` changed the request's output_token_ids"),
        (lambda _, candidates: Choice(candidates.pop(), "popped"), "AttributeError: 'tuple' object has no"),
        (lambda *_: None, "TypeError: `place` answered None; it must be a Choice"),
        (lambda _, candidates: candidates[0], "; it must be a Choice(candidate, why)"),
    ],
)
def test_what_a_placement_may_not_do_ends_its_request_alone(place: Place, told: str, num_workers: int) -> None:
    ended = run(place, num_workers)
    assert [request.handle for request in ended] == [*range(NUM_REQUESTS)]
    for request in ended[::2]:
        assert request.outcome != "finished"
        assert request.detail.startswith(f"placement {__name__}:Own raised ")
        assert told in request.detail
        assert request.detail.endswith(CHECK_IT) or "AttributeError" in told
    assert {(request.outcome, request.output_tokens) for request in ended[1::2]} == {("finished", 20)}


def test_all_that_a_request_has_is_looked_at() -> None:
    assert set(FIELDS) | {"content"} == set(Sequence.__annotations__)
