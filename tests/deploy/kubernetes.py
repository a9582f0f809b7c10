"""Kubernetes' own schemas of several versions, and the known shape of what an operator brings."""

import functools
import json
from importlib.resources import files
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

VERSIONS = ("1.29.0", "1.33.0", "1.37.0")
_SCHEMAS = files("kubernetes_validate") / "kubernetes-json-schema"

# What operators define is no part of Kubernetes, and no package that can be pinned has their schemas. These say which
# fields there are and which must be, from the operators' documentation.
_TEXT = {"type": "string"}
_LABELS = {"type": "object", "additionalProperties": _TEXT}
_SELECTOR = {"type": "object", "additionalProperties": False, "properties": {"matchLabels": _LABELS}}


def _table(required: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required.split(),
        "properties": properties,
    }


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": items}


_COUNT = {"type": "integer", "minimum": 0}
_DURATION = {"type": "string", "pattern": "^[0-9]+(ms|s|m|h|d)$"}
_RELABELING = _table("", sourceLabels=_list(_TEXT), targetLabel=_TEXT, regex=_TEXT, replacement=_TEXT, action=_TEXT)
_TRIGGER = _table(
    "type metadata",
    type={"const": "prometheus"},
    name=_TEXT,
    metricType={"enum": ["AverageValue", "Value"]},
    metadata=_table("serverAddress query threshold", serverAddress=_TEXT, query=_TEXT, threshold=_TEXT),
)
OPERATORS = {
    ("keda.sh/v1alpha1", "ScaledObject"): _table(
        "scaleTargetRef triggers",
        scaleTargetRef=_table("name", name=_TEXT),
        minReplicaCount=_COUNT,
        maxReplicaCount=_COUNT,
        pollingInterval=_COUNT,
        advanced=_table("", horizontalPodAutoscalerConfig=_table("", behavior={"type": "object"})),
        triggers=_list(_TRIGGER),
    ),
    ("monitoring.coreos.com/v1", "ServiceMonitor"): _table(
        "selector endpoints",
        jobLabel=_TEXT,
        selector=_SELECTOR,
        namespaceSelector=_table("matchNames", matchNames=_list(_TEXT)),
        endpoints=_list(_table("port", port=_TEXT, interval=_DURATION, relabelings=_list(_RELABELING))),
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): _table(
        "groups",
        groups=_list(
            _table(
                "name rules",
                name=_TEXT,
                interval=_DURATION,
                rules=_list(
                    {
                        **_table(
                            "expr",
                            expr=_TEXT,
                            record=_TEXT,
                            alert=_TEXT,
                            labels=_LABELS,
                            annotations=_LABELS,
                            **{"for": _DURATION},
                        ),
                        "oneOf": [{"required": ["record"]}, {"required": ["alert"]}],
                    }
                ),
            )
        ),
    ),
}


def faults(document: dict[str, Any], version: str) -> list[str]:
    """Return what a version of Kubernetes, or an operator, would not take of a document."""
    validator = _validator(document["apiVersion"], document["kind"], version)
    of_operator = (document["apiVersion"], document["kind"]) in OPERATORS
    instance = document["spec"] if of_operator else document
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(instance)]


@functools.cache
def _validator(api_version: str, kind: str, version: str) -> Draft202012Validator:
    if (api_version, kind) in OPERATORS:
        return Draft202012Validator(OPERATORS[api_version, kind])
    group, _, number = api_version.rpartition("/")
    name = "-".join(part for part in (kind.lower(), group.partition(".")[0], number) if part)
    schema = json.loads((_SCHEMAS / f"v{version}-local-strict" / f"{name}.json").read_text(encoding="utf-8"))
    return Draft202012Validator(schema, registry=_definitions(version))


@functools.cache
def _definitions(version: str) -> Registry[Any]:
    text = (_SCHEMAS / f"v{version}-local-strict" / "_definitions.json").read_text(encoding="utf-8")
    resource = Resource.from_contents(json.loads(text), default_specification=DRAFT202012)
    return Registry().with_resource("_definitions.json", resource).crawl()  # once, not at each reference
