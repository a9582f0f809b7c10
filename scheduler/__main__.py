"""`python -m lorrery.scheduler`."""

from lorrery.service.entry_point import exit_on_signals, set_up_grpc, set_up_standard_streams

if __name__ == "__main__":
    exit_on_signals()  # before the imports, which take most of a second
    set_up_standard_streams()
    set_up_grpc()

from prometheus_client import CollectorRegistry

from lorrery.scheduler.service import SchedulerService
from lorrery.service.process import Made, service_command
from lorrery.service.settings.cluster import Settings, load

HELP = """Run a scheduler, which forms batches for attached workers and streams their tokens to the routers.

Settings: the [scheduler] section of the cluster file (policy, limits, prefix cache, timeouts), [adapters], model and
time_scale. Workers and routers connect to it; the services may start in any order.

Examples:
  python -m lorrery.scheduler --config cluster.toml --set scheduler.listen=0.0.0.0:50052
"""


def make(settings: Settings, registry: CollectorRegistry) -> Made:
    """Build the scheduler of these settings."""
    own = settings.scheduler
    return SchedulerService(settings, registry), own.listen, own.metrics, own.drain_seconds


def main() -> None:
    """Run `python -m lorrery.scheduler`; never returns normally."""
    service_command("scheduler", HELP, load, make)


if __name__ == "__main__":
    main()
