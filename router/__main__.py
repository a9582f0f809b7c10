"""`python -m router`."""

import gc

from prometheus_client import CollectorRegistry

from chassis.process import Made, service_command
from chassis.settings import Settings
from router.service import Router

# A step's burst of messages makes some thousand objects that are gone after it. At Python's own 700 each burst sets off
# a collection that finds nothing; this takes up to a tenth off the CPU of a message.
_COLLECT_AFTER_OBJECTS = 20_000


def _make(settings: Settings, registry: CollectorRegistry) -> Made:
    router = settings.router
    service = Router(settings, registry)
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER_OBJECTS)
    return service, router.listen, router.metrics, router.drain_seconds


if __name__ == "__main__":
    service_command("router", "Run a router: the client side of a cluster.", _make)
