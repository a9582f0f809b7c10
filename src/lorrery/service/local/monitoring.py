"""The folder of files with which Prometheus and Grafana monitor a cluster without containers.

    prometheus.yml     unchanged: prometheus --config.file=FOLDER/prometheus.yml
    rules/             recording rules and alerts
    targets/           addresses of the processes; Prometheus rereads it on every change
    grafana/           dashboards, and the provisioning that loads them into Grafana

All but the targets are the shipped files, so that the folder may be edited, and moved (Grafana's provisioning names
it).
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lorrery.service.errors import LorreryError
from lorrery.service.files.shipped import GRAFANA, PROMETHEUS
from lorrery.service.files.writing import write_whole
from lorrery.service.settings.cluster import Settings

PROMETHEUS_URL = "http://127.0.0.1:9090"
"""Default address of Prometheus."""
TARGETS = Path("targets", "cluster.json")
_EVERY_INTERFACE = ("0.0.0.0", "[::]", "")  # noqa: S104  compared with, not listened on


@dataclass(frozen=True)
class Target:
    """One process that Prometheus scrapes.

    Attributes:
        name: `worker-0`; its label `instance`.
        service: `worker`; its label `job`.
        address: HOST:PORT of its metrics.
    """

    name: str
    service: str
    address: str


class Monitoring:
    """A folder with the files above.

    Args:
        folder: created on the first write.
        prometheus_url: address of Prometheus for Grafana.
    """

    def __init__(self, folder: Path, prometheus_url: str = PROMETHEUS_URL) -> None:
        self.folder = folder
        self._prometheus_url = prometheus_url

    @property
    def config(self) -> Path:
        """Path for `prometheus --config.file`."""
        return self.folder / "prometheus.yml"

    @property
    def grafana_provisioning(self) -> Path:
        """Path for Grafana's GF_PATHS_PROVISIONING."""
        return self.folder / "grafana" / "provisioning"

    def write(self, *, force: bool = False, keep: bool = False) -> list[Path]:
        """Write everything but the targets; return the files written, without those that had the same content already.

        Args:
            force: overwrite files that differ.
            keep: leave files that differ as they are.

        Raises:
            LorreryError: a file exists with other content, and neither flag is set (nothing is written then), or a file
            cannot be written.
        """
        changed = {path: text for path, text in self._files() if _content(path) != text}
        there = [path for path in changed if path.exists()]
        if keep:
            changed = {path: text for path, text in changed.items() if path not in there}
        elif there and not force:
            more = f" and {len(there) - 1} more" if len(there) > 1 else ""
            raise LorreryError(f"{there[0]}{more}: there already, and different; --force overwrites what differs")
        _write(changed)
        return sorted(changed)

    def write_targets(self, targets: Iterable[Target]) -> None:
        """Write the addresses of the processes, atomically, since Prometheus may read at any time.

        Raises:
            LorreryError: the file cannot be written.
        """
        groups = [
            {"targets": [_reachable(one.address)], "labels": {"job": one.service, "instance": one.name}}
            for one in targets
        ]
        path = self.folder / TARGETS
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, (json.dumps(groups, indent=1) + "\n").encode())
        except OSError as error:
            raise LorreryError(f"{path}: {error.strerror}") from None

    def _files(self) -> Iterator[tuple[Path, str]]:
        """Yield each file and its content."""
        yield self.config, (PROMETHEUS / "local.yml").read_text(encoding="utf-8")
        for path in sorted((PROMETHEUS / "rules").glob("*.yml")):
            yield self.folder / "rules" / path.name, path.read_text(encoding="utf-8")
        grafana = self.folder / "grafana"
        # Replaces values for Compose's containers; a JSON string is also valid YAML.
        local = {
            "http://prometheus:9090": json.dumps(self._prometheus_url),
            "/etc/grafana/dashboards": json.dumps(str((grafana / "dashboards").absolute())),
        }
        for path in sorted(GRAFANA.glob("provisioning/*/*.yml")):
            text = path.read_text(encoding="utf-8")
            yield grafana / path.relative_to(GRAFANA), _replaced(text, local)
        for path in sorted(GRAFANA.glob("dashboards/*.json")):
            yield grafana / path.relative_to(GRAFANA), path.read_text(encoding="utf-8")


def expected_targets(settings: Settings, num_workers: int) -> list[Target]:
    """Return the targets of a cluster that `lorrery up` will start with these settings.

    Raises:
        LorreryError: a process listens on a free port, unknown until it runs.
    """
    host, _, port = settings.worker.metrics.rpartition(":")
    found = [Target("scheduler", "scheduler", settings.scheduler.metrics)]
    found += [
        Target(f"worker-{index}", "worker", f"{host}:{int(port) + index if int(port) else 0}")
        for index in range(num_workers)
    ]
    found.append(Target("router", "router", settings.router.metrics))
    for target in found:
        if target.address.endswith(":0"):
            raise LorreryError(
                f"{target.service}.metrics is {target.address}: a free port, which nobody knows before it runs; give it"
                " a port, or let `lorrery up --monitoring DIR` write the files"
            )
    return found


def _reachable(address: str) -> str:
    host, _, port = address.rpartition(":")
    return f"127.0.0.1:{port}" if host in _EVERY_INTERFACE else address


def _replaced(text: str, values: Mapping[str, str]) -> str:
    for old, new in values.items():
        text = text.replace(old, new)
    return text


def _content(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise LorreryError(f"{path}: {error.strerror}") from None


def _write(files: Mapping[Path, str]) -> None:
    for path, text in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise LorreryError(f"{path}: {error.strerror}") from None
