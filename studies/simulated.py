"""One worker and its scheduler, simulated from the settings of a live cluster, for loads that no option asks for.

What the command line can ask for, a study takes from `cli.simulation.SimulatedRun`, which is `lorrery simulate`.
"""

from collections.abc import Iterable, Sequence

from lorrery.chassis.settings import Settings
from lorrery.loadgen.workload.request import WorkloadRequest
from lorrery.scheduler.messages import WorkerHello
from lorrery.scheduler.replicas import ReplicaFactory
from lorrery.simulator.build import build_requests
from lorrery.simulator.engine import Simulation
from lorrery.simulator.request import SimulatedRequest
from lorrery.simulator.stretch import Observer
from lorrery.simulator.worker import SimulatedWorker
from lorrery.worker.build import device_of


def simulate(
    settings: Settings,
    workload: Iterable[WorkloadRequest],
    *,
    observers: Sequence[Observer] = (),
    one_step: bool = False,
) -> list[SimulatedRequest]:
    """Run a workload of the base model on one worker; return its requests in order of index.

    Args:
        settings: of the cluster.
        workload: in order of time.
        observers: told of what runs.
        one_step: hand back after every step, so that observers see each for itself.
    """
    device = device_of(settings)
    deployment = device.deployment
    factory = ReplicaFactory(settings)
    hello = WorkerHello(
        worker_id="worker-0",
        gpu=deployment.gpu.name,
        model=deployment.model.name,
        tensor_parallel=deployment.tensor_parallel,
        max_total_token_num=device.pool_tokens,
        step_time_model=settings.worker.step_time,
        needs_prompts=False,
    )
    replica_settings = factory.replica_settings(hello)
    worker = SimulatedWorker(hello.worker_id, lambda: factory.replica(replica_settings), device.step_time)
    simulation = Simulation([worker], [factory.placement()], one_step=one_step, observers=observers)
    requests = build_requests(workload, deployment.model.name, {})
    return sorted(simulation.run(requests), key=lambda request: request.handle)
