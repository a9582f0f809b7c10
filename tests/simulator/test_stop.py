"""A simulation ends by itself once nobody is there, and early when it is stopped, whatever its policies say."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import numpy as np

from lorrery.loadgen.workload.request import WorkloadRequest
from lorrery.scheduler.core.admission import AdmissionPass
from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.checked.queue import CheckedQueue
from lorrery.scheduler.core.placements.table import PLACEMENTS
from lorrery.scheduler.core.queues.base import ListedQueue
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence
from lorrery.simulator import interpreter
from lorrery.simulator.loop.build import build_requests, build_workers
from lorrery.simulator.loop.engine import ITERATIONS_PER_CHECK, Simulation
from lorrery.worker.device.constant import LlmMock


class Starves(ListedQueue):
    """Lets nobody in, and would be asked again for ever; at the hundredth time there is a signal."""

    def __init__(self) -> None:
        super().__init__()
        self.num_asked = 0

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        return []

    def wakes_at_ps(self, at_ps: int) -> int:
        self.num_asked += 1
        if self.num_asked == 100:
            signal.raise_signal(signal.SIGINT)
        return at_ps + 1


class NeverEmpty(ListedQueue):
    """Says that somebody waits, always, and would be asked again every nanosecond."""

    def __init__(self) -> None:
        super().__init__()
        self.num_asked = 0

    def __len__(self) -> int:
        return 1

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        for sequence in self:
            admission.admit(sequence)
        self._waiting.remove_all(admission.admitted)
        return []

    def wakes_at_ps(self, at_ps: int) -> int:
        self.num_asked += 1
        return at_ps + 1_000


def simulation_of(queue: ListedQueue) -> Simulation:
    settings = ReplicaSettings("fcfs", 1_000, 400, max_num_seqs=2, max_num_batched_tokens=500)
    workers = build_workers(
        1, settings, LlmMock(), lambda s: build_replica(s, make_queue=lambda _: CheckedQueue(queue))
    )
    return Simulation(workers, PLACEMENTS["least_loaded"](np.random.default_rng(1)))


@contextmanager
def interrupts_call(what: Callable[[], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, lambda _number, _frame: what())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


WORKLOAD = [WorkloadRequest(n, n / 100, 50, 20) for n in range(4)]


def test_a_signal_ends_a_run_in_which_nothing_ends() -> None:
    queue = Starves()
    simulation = simulation_of(queue)
    with interrupts_call(simulation.stop):
        ended = list(simulation.run(build_requests(WORKLOAD, "", {})))
    assert not ended
    assert queue.num_asked <= ITERATIONS_PER_CHECK
    assert [request.outcome for request in simulation.close()] == ["interrupted"]


def test_a_run_ends_when_idle_workers_alone_are_asked_again_and_again() -> None:
    queue = NeverEmpty()
    ended = list(simulation_of(queue).run(build_requests(WORKLOAD, "", {})))
    assert {request.outcome for request in ended} == {"finished"}
    assert queue.num_asked > ITERATIONS_PER_CHECK


def test_signals_find_interpreted_code_in_the_loop() -> None:
    spec = find_spec(interpreter.__name__)
    assert spec is not None
    assert str(spec.origin).endswith(".py")
