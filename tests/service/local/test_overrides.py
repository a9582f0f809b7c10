"""Where a service listens that starts again after its process has ended."""

from pathlib import Path
from typing import Any

from lorrery.service.local.overrides import on_free_ports, taken_again
from lorrery.service.local.processes import ServiceProcess
from lorrery.service.settings.cluster import changed

SETTINGS = changed(
    {
        "scheduler": {"prefix_cache": {"kind": "blocks"}, "memory": "paged"},
        "worker": {"kv_events": {"endpoint": "tcp://*:0"}},
    }
)
NOT_USED: Any = None


def ended(service: str, **addresses: Any) -> ServiceProcess:
    return ServiceProcess(service, service, [], NOT_USED, Path(), **addresses)


def test_service_takes_the_ports_again_that_it_announced():
    worker = ended("worker", grpc="h:1", metrics="h:2", others={"kv_events": "tcp://h:3"})
    assert taken_again(SETTINGS, worker) == [
        "worker.listen=h:1",
        "worker.metrics=h:2",
        "worker.kv_events.endpoint=tcp://*:3",
    ]
    router = ended("router", grpc="h:1", metrics="h:2", others={"vllm_grpc": "h:4"})
    assert taken_again(SETTINGS, router) == ["router.listen=h:1", "router.metrics=h:2", "router.vllm_grpc=h:4"]


def test_service_that_ended_before_it_announced_listens_where_it_would_have():
    for service in ("scheduler", "worker", "router"):
        assert taken_again(SETTINGS, ended(service)) == []


def test_a_router_has_further_ports_for_gateways_which_are_free_or_taken_again():
    given = 'router.engines=[{protocol="vllm", listen="h:5", adapter="a"}, {protocol="sglang", listen="k:6"}]'
    settings = changed({}, [given])
    freed = changed({}, [given, *on_free_ports(settings)]).router.engines
    assert [(port.protocol, port.listen, port.adapter) for port in freed] == [
        ("vllm", "h:0", "a"),
        ("sglang", "k:0", ""),
    ]
    router = ended("router", others={"engines[0]": "h:7", "engines[1]": "k:8"})
    again = changed({}, [given, *on_free_ports(settings), *taken_again(settings, router)]).router.engines
    assert [(port.protocol, port.listen, port.adapter) for port in again] == [
        ("vllm", "h:7", "a"),
        ("sglang", "k:8", ""),
    ]
    assert not any("engines" in override for override in on_free_ports(SETTINGS))
