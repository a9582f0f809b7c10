"""What a real Prometheus says of configuration, rules and alerts, and of a cluster that `lorrery up` runs.

Skipped without the programs `prometheus` and `promtool`; CI has them from the image of compose.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lorrery.service.local.monitoring import Monitoring
from tests.cli.test_up import Up
from tests.cluster.harness import wait_until, write_settings
from tests.deploy.files import DEPLOY, ROOT, RULES
from tests.ports import held_ports

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool")
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus")


def promtool(*arguments: str | Path, folder: Path = ROOT) -> None:
    done = subprocess.run(
        ["promtool", *map(str, arguments)], cwd=folder, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_every_alert_fires_when_it_should_and_only_then() -> None:
    promtool("test", "rules", "alerts_test.yml", folder=ROOT / "tests" / "deploy" / "rules")


@needs_promtool
def test_promtool_accepts_configurations_and_rules(tmp_path: Path) -> None:
    promtool("check", "config", DEPLOY / "prometheus" / "prometheus.yml")
    promtool("check", "rules", *RULES)
    files = Monitoring(tmp_path)
    files.write()
    files.write_targets([])
    promtool("check", "config", files.config)


class Prometheus:
    """A running one."""

    def __init__(self, address: str) -> None:
        self._address = address

    def get(self, path: str, **query: str) -> Any:
        """Return what its API answers; None while it does not."""
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=60) as reply:
                return json.load(reply)["data"]
        except OSError:
            return None

    def targets(self) -> dict[tuple[str, str], str]:
        """Return health by job and instance."""
        found = self.get("targets", state="active") or {"activeTargets": []}
        return {(one["labels"]["job"], one["labels"]["instance"]): one["health"] for one in found["activeTargets"]}


@contextlib.contextmanager
def prometheus_of(config: Path, data: Path) -> Iterator[Prometheus]:
    with held_ports(1) as (port,):
        command = [
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={data}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            try:
                yield Prometheus(f"127.0.0.1:{port}")
            finally:
                process.terminate()


UP = {("scheduler", "scheduler"): "up", ("worker", "worker-0"): "up", ("router", "router"): "up"}


@needs_prometheus
@pytest.mark.cluster
async def test_prometheus_follows_a_cluster_of_lorrery_up_by_the_printed_file(tmp_path: Path) -> None:
    folder = tmp_path / "monitoring"
    arguments = ("--config", str(write_settings(tmp_path)), "--workers", "1", "--restart", "--monitoring", str(folder))
    up = await Up.start(*arguments)
    try:
        printed = await up.wait_for("Prometheus: prometheus --config.file=")
        match = re.search(r"--config\.file=(\S+)", printed)
        assert match
        with prometheus_of(Path(match[1]), tmp_path / "data") as prometheus:
            await wait_until(lambda: prometheus.targets() == UP, what="three targets that are up")
            old = _target(folder, "worker-0")
            os.kill(up.pid_of("worker"), signal.SIGKILL)
            await up.wait_for("worker-0 ended with signal 9; it starts again")
            await up.wait_for("worker-0 runs again")
            await wait_until(lambda: prometheus.targets() == UP, what="the worker's target again")
            assert _target(folder, "worker-0") == old
            groups = prometheus.get("rules")["groups"]
            faults = [rule["lastError"] for group in groups for rule in group["rules"] if rule.get("lastError")]
            assert not faults
            assert {Path(group["file"]).name for group in groups} == {path.name for path in RULES}
            (series,) = prometheus.get("query", query='lorrery_worker_attached{worker="worker-0"}')["result"]
            assert series["metric"]["instance"] == "worker-0"
            up.process.send_signal(signal.SIGINT)
            assert await up.end() == 0
            await wait_until(lambda: not prometheus.targets(), what="no target of a cluster that has stopped")
    finally:
        await up.gone()


def _target(folder: Path, name: str) -> str:
    groups = json.loads((folder / "targets" / "cluster.json").read_text())
    return next(group["targets"][0] for group in groups if group["labels"]["instance"] == name)
