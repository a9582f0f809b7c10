"""Ports at which a router is an engine: what their settings lead to."""

import sys

import pytest
from prometheus_client import CollectorRegistry

from lorrery.router.service import Router
from lorrery.service.errors import SettingsError
from lorrery.service.settings.cluster import load


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ("router.smg_vllm_grpc=127.0.0.1:0", "smg_vllm_grpc"),
        ("router.sglang_grpc=127.0.0.1:0", "sglang_grpc"),
        ('router.engines=[{ protocol = "sglang", listen = "127.0.0.1:0" }]', "engines[0]"),
    ],
)
async def test_a_protocol_without_its_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, setting: str, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "smg_grpc_proto", None)
    with pytest.raises(SettingsError) as caught:
        Router(load(None, [setting]), CollectorRegistry())
    assert f"router.{name}: " in str(caught.value)
    assert "pip install 'lorrery[engines]'" in str(caught.value)


def test_each_port_is_announced_under_a_name_of_its_own() -> None:
    ports = load(
        None,
        [
            "router.vllm_grpc=127.0.0.1:1",
            'router.engines=[{ protocol = "vllm", listen = "127.0.0.1:2", adapter = "lora" }]',
        ],
    ).router.engine_ports()
    assert {name: (port.protocol, port.listen, port.adapter) for name, port in ports.items()} == {
        "vllm_grpc": ("vllm", "127.0.0.1:1", ""),
        "engines[0]": ("vllm", "127.0.0.1:2", "lora"),
    }
