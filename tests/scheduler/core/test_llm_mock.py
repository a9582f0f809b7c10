"""llm-mock's empty step."""

from lorrery.scheduler.core.admission import BatchLimits
from lorrery.scheduler.core.batching.whole_prompts import LlmMock
from lorrery.scheduler.core.memory.base import UnlimitedMemory
from lorrery.scheduler.core.plan import Idle, Plan
from lorrery.scheduler.core.queues.fifo import Fifo
from lorrery.scheduler.core.replica import Replica
from lorrery.validation.policy.drive import Device, step_by_step
from lorrery.vocabulary.units import NEVER
from tests.scheduler.core.queues.one_queue import request, world


def test_llm_mock_runs_one_empty_step_when_its_batch_has_drained() -> None:
    replica = Replica(Fifo(), LlmMock(BatchLimits(2, NEVER)), UnlimitedMemory())
    replica.submit(request(0, None, output=1), 0)
    first = replica.plan(0)
    assert isinstance(first, Plan)
    device = Device({0: 1})
    ran = device.run(first, 0, 1, None)
    replica.commit(first, ran)
    empty = replica.plan(ran.end_ps)
    assert isinstance(empty, Plan)
    assert (empty.max_steps, empty.prefills, empty.decode, empty.joins) == (1, (), False, ())
    ran = device.run(empty, ran.end_ps, 1, None)
    assert replica.commit(empty, ran) == []
    assert isinstance(replica.plan(ran.end_ps), Idle)


def test_llm_mock_runs_no_empty_step_if_somebody_waits() -> None:
    log = step_by_step(
        Replica(Fifo(), LlmMock(BatchLimits(1, NEVER)), UnlimitedMemory()),
        world([request(0, None, output=1), request(1, None, output=1)]),
    )
    (end_ps,) = (entry[1] for entry in log if entry[0] == "finished" and entry[2] == 0)
    assert ("admitted", end_ps, 1, 0) in log
