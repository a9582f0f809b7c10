"""What dashboards, rules and the docs ask Prometheus for, and whether that exists."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.exported import EXPORTED, TABLES, families, in_table
from tests.deploy.files import RULES

SERIES = re.compile(r"\b(?:lorrery|process|python|vllm|ALERTS|up)\b[\w:]*|\b(?:lorrery|process|python)_\w+")
BY_TRAFFIC = {
    "job",
    "instance",
    "worker",
    "adapter",
    "tenant",
    "model_name",
    "alertname",
    "alertstate",
    "slo",
    "window",
}
"""Labels whose values Prometheus, rules or what happens decide."""


def board_of(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def asked_by_board(board: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (where, PromQL) of everything in a dashboard that asks Prometheus."""
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            yield f"panel {panel['title']!r}", target["expr"]
    for note in board["annotations"]["list"]:
        yield f"annotation {note['name']!r}", note["expr"]
    for variable in board["templating"].get("list", []):
        yield f"variable {variable['name']!r}", variable["query"]["query"]


def rules() -> Iterator[dict[str, Any]]:
    for path in RULES:
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]:
            yield from group["rules"]


def recorded() -> dict[str, frozenset[str]]:
    """Return each recorded name with the labels that its rules set."""
    names: dict[str, frozenset[str]] = {}
    for rule in rules():
        if name := rule.get("record"):
            names[name] = names.get(name, frozenset()) | rule.get("labels", {}).keys()
    return names


def exported_samples() -> dict[str, frozenset[str]]:
    """Return each name that services export, as an expression has it, with its labels."""
    names: dict[str, frozenset[str]] = {}
    for part in TABLES:
        for name, entry in in_table(part).items():
            if entry.type == "histogram":
                names[f"{name}_sum"] = names[f"{name}_count"] = entry.labels
                names[f"{name}_bucket"] = entry.labels | {"le"}
            else:
                names[name] = entry.labels
    return names


def known() -> set[str]:
    return {*exported_samples(), *recorded(), "up", "ALERTS"}


def exported_values() -> tuple[dict[tuple[str, str], set[str]], dict[str, set[str]]]:
    """Return the values that labels have from the start, by series and label, and by label alone."""
    by_series: dict[tuple[str, str], set[str]] = {}
    by_label: dict[str, set[str]] = {}
    for part in EXPORTED:
        for family in families(part):
            for sample in family.samples:
                for label, value in sample.labels.items():
                    by_series.setdefault((sample.name, label), set()).add(value)
                    by_label.setdefault(label, set()).add(value)
    return by_series, by_label


def check_series(where: str, expression: str) -> None:
    asked = set(SERIES.findall(expression))
    assert asked, where
    missing = {name for name in asked if not name.startswith("vllm:")} - known()
    assert not missing, f"{where}: {missing}"


def check_values(where: str, expression: str) -> None:
    """Every value that a selector names is one that the label can have."""
    samples, (by_series, by_label) = exported_samples(), exported_values()
    for name, selector in re.findall(r"([\w:]+)\{([^}]*)\}", expression):
        for label, operator, wanted in re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', selector):
            if label in BY_TRAFFIC or name.startswith("vllm:") or wanted.startswith(("$", ".+")):
                continue
            assert label in samples[name], f"{where}: {name} has no label {label}"
            values = by_series.get((name, label), by_label.get(label, set()))
            if label == "outcome" and name.startswith(
                "lorrery_router_"
            ):  # by adapter and tenant they come as they occur
                values = by_series["lorrery_router_requests_total", label]
            choices = set(wanted.split("|") if "~" in operator else [wanted])
            assert choices <= values, f"{where}: {label} of {name} is never {choices - values}"
