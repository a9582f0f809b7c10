"""The folder that Prometheus and Grafana read: complete, edits in it are safe, targets are where the processes are."""

import json
from pathlib import Path

import pytest
import yaml

from lorrery.service.errors import LorreryError
from lorrery.service.files.shipped import DEFAULT_SETTINGS
from lorrery.service.local.monitoring import TARGETS, Monitoring, Target, expected_targets
from lorrery.service.settings.cluster import load
from tests.deploy.files import DASHBOARDS, DEPLOY, RULES


def test_folder_has_what_prometheus_yml_names_and_every_rule_and_dashboard(tmp_path: Path):
    files = Monitoring(tmp_path / "new" / "one")
    written = files.write()
    config = yaml.safe_load(files.config.read_text(encoding="utf-8"))
    assert config["rule_files"] == ["rules/*.yml"]
    assert {path.name for path in files.folder.glob("rules/*.yml")} == {path.name for path in RULES}
    assert {path.name for path in files.folder.glob("grafana/dashboards/*")} == {path.name for path in DASHBOARDS}
    (job,) = config["scrape_configs"]
    assert TARGETS.match(job["file_sd_configs"][0]["files"][0])
    assert set(written) == {path for path in files.folder.rglob("*") if path.is_file()}
    assert files.write() == []


def test_grafana_finds_prometheus_and_the_dashboards_of_the_folder(tmp_path: Path):
    folder = tmp_path / 'with "quotes" and spaces'
    files = Monitoring(folder, "http://10.0.0.5:9091")
    files.write()
    provisioning = files.grafana_provisioning
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "lorrery.yml").read_text())["providers"]
    shipped = yaml.safe_load((DEPLOY / "grafana" / "provisioning" / "datasources" / "prometheus.yml").read_text())
    assert source == {**shipped["datasources"][0], "url": "http://10.0.0.5:9091"}
    assert provider["options"]["path"] == str(folder / "grafana" / "dashboards")


def test_a_changed_file_is_kept_or_refused_or_overwritten_as_told(tmp_path: Path):
    files = Monitoring(tmp_path)
    files.write()
    changed = tmp_path / "rules" / "alerts.yml"
    changed.write_text("groups: []\n")
    (tmp_path / "rules" / "recording.yml").unlink()
    with pytest.raises(LorreryError, match=r"alerts\.yml: there already, and different; --force"):
        files.write()
    assert not (tmp_path / "rules" / "recording.yml").exists()
    assert files.write(keep=True) == [tmp_path / "rules" / "recording.yml"]
    assert changed.read_text() == "groups: []\n"
    assert files.write(force=True) == [changed]
    assert "LorreryNoWorkers" in changed.read_text()


def test_a_folder_that_cannot_be_written_is_an_error_with_its_name(tmp_path: Path):
    (tmp_path / "file").touch()
    for action in (Monitoring(tmp_path / "file").write, lambda: Monitoring(tmp_path / "file").write_targets([])):
        with pytest.raises(LorreryError, match=r"/file/"):
            action()


def test_targets_have_job_and_name_and_an_address_that_can_be_dialled(tmp_path: Path):
    files = Monitoring(tmp_path)
    files.write_targets([Target("worker-0", "worker", "0.0.0.0:9103"), Target("router", "router", "host:1")])
    assert json.loads((tmp_path / TARGETS).read_text()) == [
        {"targets": ["127.0.0.1:9103"], "labels": {"job": "worker", "instance": "worker-0"}},
        {"targets": ["host:1"], "labels": {"job": "router", "instance": "router"}},
    ]
    files.write_targets([])
    assert json.loads((tmp_path / TARGETS).read_text()) == []
    assert [path.name for path in (tmp_path / TARGETS).parent.iterdir()] == [TARGETS.name]


def test_expected_targets_are_those_of_the_settings_and_a_free_port_is_refused():
    settings = load(DEFAULT_SETTINGS)
    assert [(one.name, one.service, one.address) for one in expected_targets(settings, 2)] == [
        ("scheduler", "scheduler", "127.0.0.1:9102"),
        ("worker-0", "worker", "127.0.0.1:9103"),
        ("worker-1", "worker", "127.0.0.1:9104"),
        ("router", "router", "127.0.0.1:9101"),
    ]
    with pytest.raises(LorreryError, match=r"worker\.metrics is 127\.0\.0\.1:0: a free port"):
        expected_targets(load(DEFAULT_SETTINGS, ["worker.metrics=127.0.0.1:0"]), 1)
