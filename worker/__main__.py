"""`python -m lorrery.worker`: one mock GPU that attaches to a scheduler."""

from lorrery.service.entry_point import exit_on_signals, set_up_grpc, set_up_standard_streams

if __name__ == "__main__":
    exit_on_signals()  # before the imports, which take most of a second
    set_up_standard_streams()
    set_up_grpc()

from prometheus_client import CollectorRegistry

from lorrery.service.process import Service, service_command
from lorrery.service.settings.cluster import Settings, load
from lorrery.worker.service import WorkerService
from lorrery.worker.timekeeping import take_realtime_priority

HELP = """Run a mock GPU that attaches to a scheduler.

The worker dials worker.scheduler, announces its GPU, model and KV pool, and runs the scheduler's plans, taking as long
as that GPU would. It answers health checks: SERVING while attached.

Settings: the [worker] section of the cluster file (scheduler, gpu, step_time), [adapters] and model.

Examples:
  python -m lorrery.worker --config cluster.toml --set worker.scheduler=scheduler:50052 --set worker.gpu=A10G
"""


def make(settings: Settings, registry: CollectorRegistry) -> tuple[Service, str, str, float]:
    """Return the service, its listen address, its metrics address and its drain limit in seconds."""
    worker = settings.worker
    priority = take_realtime_priority(worker.realtime)
    return WorkerService(settings, registry, priority), worker.listen, worker.metrics, worker.drain_seconds


def main() -> None:
    """Run `python -m lorrery.worker`; never returns normally."""
    service_command("worker", HELP, load, make)


if __name__ == "__main__":
    main()
