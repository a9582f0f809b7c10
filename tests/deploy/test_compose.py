"""docker-compose.yml and what it mounts: hardening, addresses and graces that fit the settings, valid provisioning."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from lorrery.service.settings.cluster import Settings, load
from lorrery.view.command import app as page

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES: dict[str, Any] = COMPOSE["services"]
SECURED: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.secured.yml").read_text(encoding="utf-8"))["services"]
OURS = ("router", "scheduler", "worker")
RESULTS = "/out"
HEALTH_PORTS = {"router": 50051, "scheduler": 50052, "worker": 50053}


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Settings:
    """What a service in a container reads."""
    for name, value in SERVICES["router"]["environment"].items():
        if name != "LORRERY_CONFIG" and value is not None:
            monkeypatch.setenv(name, value)
    return load(ROOT / "deploy" / "cluster.toml")


@pytest.mark.parametrize("name", [*SERVICES, "credentials"])
def test_every_container_is_locked_down(name: str) -> None:
    service = SERVICES.get(name) or SECURED[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not service.get("privileged")
    assert "user" not in service, "the image's own numeric user holds"


@pytest.mark.parametrize("name", sorted(SECURED.keys() - {"credentials"}))
def test_a_secured_service_waits_for_its_credentials_and_can_only_read_them(name: str) -> None:
    service = SECURED[name]
    assert name in SERVICES
    assert service["depends_on"] == {"credentials": {"condition": "service_completed_successfully"}}
    assert service["volumes"] == ["credentials:/credentials:ro"]
    assert not {"ports", "user", "read_only", "cap_drop", "security_opt"} & service.keys()


def test_every_service_of_ours_is_secured() -> None:
    ours = {name for name, service in SERVICES.items() if "lorrery" in service["image"]}
    assert SECURED.keys() == ours | {"credentials"}


@pytest.mark.parametrize("name", SERVICES)
def test_ports_are_published_on_loopback_and_through_a_variable(name: str) -> None:
    for port in SERVICES[name].get("ports", []):
        assert re.fullmatch(r"127\.0\.0\.1:\$\{[A-Z]+_PORT:-\d+\}:\d+", port)


@pytest.mark.parametrize("name", SERVICES)
def test_mounted_files_are_there_and_read_only(name: str) -> None:
    for volume in SERVICES[name].get("volumes", []):
        source, target, *mode = re.sub(r"\$\{[A-Z]+:-([^}]+)\}", r"\1", volume).split(":")
        if source.startswith("./") and target != RESULTS:
            assert (ROOT / source).exists(), volume
            assert mode == ["ro"], f"{target} is writable"


def test_only_the_load_generator_has_a_place_to_write_and_out_is_it_inside_too() -> None:
    writable = {
        name: [v for v in one.get("volumes", []) if v.endswith(f":{RESULTS}")] for name, one in SERVICES.items()
    }
    assert {name: volumes for name, volumes in writable.items() if volumes} == {
        "loadgen": [f"${{OUT:-./out}}:{RESULTS}"]
    }
    # Its own list replaces the one that all services share.
    assert SERVICES["router"]["volumes"][0] in SERVICES["loadgen"]["volumes"]
    last_stage = (ROOT / "Dockerfile").read_text(encoding="utf-8").rpartition("\nFROM ")[2]
    assert "WORKDIR" not in last_stage, "out/NAME is /out/NAME from / only"


@pytest.mark.parametrize("name", OURS)
def test_commands_are_exec_form_and_health_is_asked_by_grpc(name: str) -> None:
    service = SERVICES[name]
    assert service["command"] == [f"lorrery.{name}"]
    probe = service["healthcheck"]["test"]
    assert probe[0] == "CMD"
    assert probe[-2:] == ["/opt/healthcheck.py", f"127.0.0.1:{HEALTH_PORTS[name]}"]


def test_one_image_serves_all() -> None:
    assert len({SERVICES[name]["image"] for name in (*OURS, "loadgen", "web")}) == 1


def test_the_page_s_command_is_one_that_it_takes() -> None:
    module, *arguments = SERVICES["web"]["command"]
    assert module == "lorrery.view"
    with get_command(page).make_context(module, arguments) as context:
        assert (context.params["target"], context.params["host"], context.params["port"]) == (
            "router:50051",
            "0.0.0.0",
            8080,
        )


def test_the_environment_gives_addresses_that_other_containers_reach(settings: Settings) -> None:
    # A name that stands for every replica: a plain address would keep each router and worker at one of several.
    assert settings.router.schedulers == (settings.worker.scheduler,) == ("dns:///scheduler:50052",)
    for name, port in HEALTH_PORTS.items():
        section = getattr(settings, name)
        assert section.listen == f"0.0.0.0:{port}"
        assert section.metrics == "0.0.0.0:9100"


@pytest.mark.parametrize("name", OURS)
def test_a_stop_leaves_time_for_the_whole_drain(name: str, settings: Settings) -> None:
    grace = SERVICES[name]["stop_grace_period"]
    assert float(grace.removesuffix("s")) > getattr(settings, name).drain_seconds


def test_prometheus_finds_every_replica_of_every_service() -> None:
    prometheus = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    jobs = {job["job_name"]: job["dns_sd_configs"][0] for job in prometheus["scrape_configs"]}
    assert jobs.keys() == {*OURS, "loadgen"}
    for name, discovery in jobs.items():
        assert (discovery["names"], discovery["type"], discovery["port"]) == ([name], "A", 9100)


def test_the_load_generator_shows_its_metrics_where_prometheus_looks() -> None:
    entrypoint = SERVICES["loadgen"]["entrypoint"]
    assert entrypoint[entrypoint.index("--metrics") + 1] == "0.0.0.0:9100"


def _datasources(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        if isinstance(part.get("datasource"), dict):
            yield part["datasource"].get("uid", "")
        for value in part.values():
            yield from _datasources(value)
    elif isinstance(part, list):
        for value in part:
            yield from _datasources(value)


def test_dashboards_name_the_provisioned_datasource() -> None:
    provisioning = ROOT / "deploy" / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "lorrery.yml").read_text())["providers"]
    assert provider["options"]["path"] == "/etc/grafana/dashboards"
    assert source["url"] == "http://prometheus:9090"
    for path in (ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"):
        uids = set(_datasources(json.loads(path.read_text(encoding="utf-8"))))
        assert uids <= {source["uid"], "-- Grafana --"}, path.name
