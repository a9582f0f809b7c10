"""`python -m lorrery.router`."""

from lorrery.service.entry_point import exit_on_signals, set_up_grpc, set_up_standard_streams

if __name__ == "__main__":
    exit_on_signals()  # before the imports, which take most of a second
    set_up_standard_streams()
    set_up_grpc()

from importlib import import_module

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from lorrery.router.edges import DIALECTS
from lorrery.router.service import Router
from lorrery.service.process import Made, service_command
from lorrery.service.settings.cluster import Settings, load

HELP = """Run a router: the client-facing service of a cluster.

Clients call it over gRPC: Generate streams one request's tokens and text; other calls are for adapters and for the
state of the cluster. The router converts text to tokens and back, sends each request to a scheduler, and resumes it if
that scheduler is lost. It keeps dialling every scheduler in router.schedulers, and answers health checks: SERVING once
the first one is connected.

Settings: the [router] section of the cluster file (listen, schedulers, tokenizer, limits for clients), and model. It
also reads adapters.max_lora_rank and scheduler.max_req_input_len, so use the same file for all services of a cluster.

Examples:
  python -m lorrery.router --config cluster.toml --set router.listen=0.0.0.0:50051
"""


def _make(settings: Settings, registry: CollectorRegistry) -> Made:
    router = settings.router
    return Router(settings, registry), router.listen, router.metrics, router.drain_seconds


def prepare() -> None:
    """Import what the first router of a process imports, for those that are forked from this one."""
    for dialect in DIALECTS:
        import_module(dialect)

    def route(parameter: str) -> None:
        del parameter

    FastAPI().add_api_route("/", route)  # for the first parameter of a route it imports a module of its own


def main() -> None:
    """Run `python -m lorrery.router`; never returns normally."""
    service_command("router", HELP, load, _make)


if __name__ == "__main__":
    main()
