"""Runs `helm` on the chart, and reads what it renders."""

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from lorrery.service.settings.cluster import Settings, load
from tests.deploy.files import DEPLOY

PROGRAM = Path(sys.executable).with_name("helm")
CHART = DEPLOY / "helm" / "lorrery"
CASES = {path.name.removesuffix("-values.yaml"): path for path in sorted((CHART / "ci").glob("*-values.yaml"))}
"""Values that the chart is rendered with, by name."""
RELEASE, NAMESPACE = "prod", "serving"
SERVICES = ("router", "scheduler", "worker")
KEDA = "worker.autoscaling.by=keda,worker.autoscaling"

Document = dict[str, Any]
Labels = dict[str, str]


def helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the program of this environment."""
    # One thread, and no time on memory that the end of the process frees.
    environment = {**os.environ, "GOMAXPROCS": "1", "GOGC": "off"}
    return subprocess.run(
        [PROGRAM, *map(str, arguments)], env=environment, capture_output=True, text=True, check=False, timeout=60
    )


def template(*options: str | Path) -> list[Document]:
    """Render the chart; return its documents."""
    result = helm("template", RELEASE, CHART, "--namespace", NAMESPACE, *options)
    assert result.returncode == 0, result.stderr
    # libyaml: a tenth of the time.
    return [document for document in yaml.load_all(result.stdout, yaml.CSafeLoader) if document is not None]


@functools.cache
def rendered(case: str) -> tuple[Document, ...]:
    """Return the documents of one of `CASES`."""
    return tuple(template("--values", CASES[case]))


class Pod(NamedTuple):
    """The pods of one Deployment, StatefulSet or Job, or one by itself."""

    owner: Document
    metadata: Document
    spec: Document

    @property
    def labels(self) -> Labels:
        return self.metadata["labels"]

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def container(self) -> Document:
        (only,) = self.spec["containers"]
        return only

    @property
    def name(self) -> str:
        """Of the first pod, with what Kubernetes appends."""
        return f"{self.owner['metadata']['name']}-0"

    @property
    def environment(self) -> dict[str, str]:
        """What the process sees; of Secrets their name."""
        values: dict[str, str] = {}
        for entry in self.container["env"]:
            match entry:
                case {"value": str() as value}:
                    values[entry["name"]] = value
                case {"valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}:
                    values[entry["name"]] = self.name
                case {"valueFrom": {"secretKeyRef": {"name": str() as secret}}}:
                    values[entry["name"]] = secret
                case _:
                    raise AssertionError(entry)
        return values

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container.get("ports", [])}

    @property
    def probes(self) -> dict[str, Document]:
        kinds = ("startupProbe", "readinessProbe", "livenessProbe")
        return {kind: self.container[kind] for kind in kinds if kind in self.container}


def kind(documents: tuple[Document, ...] | list[Document], name: str) -> list[Document]:
    """Return the documents of a kind."""
    return [document for document in documents if document["kind"] == name]


def pods(case: str) -> Iterator[Pod]:
    """Yield the pods of one of `CASES`."""
    yield from pods_of(rendered(case))


def pods_of(documents: tuple[Document, ...] | list[Document]) -> Iterator[Pod]:
    for document in documents:
        if document["kind"] == "Pod":
            yield Pod(document, document["metadata"], document["spec"])
        elif "template" in document.get("spec", {}):
            template = document["spec"]["template"]
            yield Pod(document, template["metadata"], template["spec"])


def selects(selector: Labels, labels: Labels) -> bool:
    """Return whether a selector's labels are all there."""
    return selector.items() <= labels.items()


@functools.cache
def services(case: str) -> tuple[tuple[Pod, Settings], ...]:
    """Return the pods of services, each with what its process reads: the ConfigMap's file, and its environment."""
    return tuple((pod, _settings_of(case, pod)) for pod in pods(case) if pod.component in SERVICES)


def _settings_of(case: str, pod: Pod) -> Settings:
    (config,) = (one for one in kind(rendered(case), "ConfigMap") if "cluster.toml" in one["data"])
    mounts = {mount["name"]: mount["mountPath"] for mount in pod.container["volumeMounts"]}
    name = config["metadata"]["name"]
    (volume,) = (one for one in pod.spec["volumes"] if one.get("configMap", {}).get("name") == name)
    assert pod.environment["LORRERY_CONFIG"] == f"{mounts[volume['name']]}/cluster.toml"
    with pytest.MonkeyPatch.context() as patch, tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        for variable, value in pod.environment.items():
            patch.setenv(variable, value)
        file.write(config["data"]["cluster.toml"])
        file.flush()
        return load(Path(file.name))


def groups(*names: str) -> str:
    """Return `--set`'s argument for groups of one worker each."""
    return ",".join(f"workers[{index}].name={name},workers[{index}].replicas=1" for index, name in enumerate(names))
