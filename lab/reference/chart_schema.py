"""deploy/helm/lorrery/values.schema.json: what the chart's values may be, the settings as their models say.

Helm reads JSON Schema of draft 7, and its messages say little about `anyOf`: where a value may be null, its type says
so.
"""

import json
from collections.abc import Mapping
from typing import Any

from lorrery.service.settings.cluster import Settings
from lorrery.worker.settings import OF_PROCESS

Schema = dict[str, Any]

OWNED: Mapping[str, tuple[str, ...]] = {
    "": ("cluster_token", "server_tls", "client_tls", "workers"),
    "router": ("listen", "http", "metrics", "schedulers", "keys"),
    "scheduler": ("listen", "metrics"),
    "worker": ("listen", "metrics", "scheduler", "name", "group"),
    "tracing": ("headers",),
}
"""Settings that the chart itself sets, by section: addresses, names and credentials."""

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
TABLE: Schema = {"type": "object"}
TEXTS: Schema = {"type": "array", "items": TEXT}
LABELS: Schema = {"type": "object", "additionalProperties": TEXT}
OBJECTS: Schema = {"type": "array", "items": TABLE}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
_PART = "[a-z0-9]+(([._]|__|-+)[a-z0-9]+)*"
REPOSITORY = rf"^(([A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\])(:[0-9]+)?/)?{_PART}(/{_PART})*$"
"""Of an image: HOST:PORT/PATH, of which only the path is required."""
TAG = "^([A-Za-z0-9_][A-Za-z0-9._-]{0,127})?$"
SERVICE_NAME = "^([a-z]([-a-z0-9]*[a-z0-9])?)?$"
DNS_LABEL = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
DURATION = f"^({''.join(f'([0-9]+{unit})?' for unit in ('y', 'w', 'd', 'h', 'm', 's', 'ms'))})$"
"""Of Prometheus' operator, which takes an empty one as unset."""
QUANTITY = "^[0-9]+([.][0-9]+)?([kMGTPE]|[KMGTPE]i)?$"
"""Of Kubernetes, but for exponents and thousandths."""


def chart_schema() -> str:
    """Return the file."""
    settings, sections = _settings()
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart lorrery",
        "description": "Made by `make docs` from lab/reference/chart_schema.py and the settings: edit those.",
        **_table(_values(settings, sections["WorkerSettings"])),
        "$defs": sections,
    }
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def _table(properties: Mapping[str, Schema], required: tuple[str, ...] = ()) -> Schema:
    """Return the schema of an object with these keys and no others."""
    return {
        "type": "object",
        "additionalProperties": False,
        **({"required": list(required)} if required else {}),
        "properties": dict(properties),
    }


def _count(minimum: int) -> Schema:
    return {"type": "integer", "minimum": minimum}


def _one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def _text(pattern: str) -> Schema:
    return {"type": "string", "pattern": pattern}


def _values(settings: Schema, worker: Schema) -> dict[str, Schema]:
    pod = {
        "resources": _table({"requests": TABLE, "limits": TABLE}),
        "podAnnotations": LABELS,
        "podLabels": LABELS,
        "nodeSelector": LABELS,
        "tolerations": OBJECTS,
        "affinity": TABLE,
        "priorityClassName": TEXT,
    }
    num_unavailable = {"type": ["integer", "string"], "minimum": 0, "pattern": "^(100|[1-9]?[0-9])%$"}
    budget = _table({"enabled": FLAG, "maxUnavailable": num_unavailable})
    service = {
        "type": _one_of("ClusterIP", "NodePort", "LoadBalancer"),
        "annotations": LABELS,
        "loadBalancerSourceRanges": TEXTS,
    }
    extra_port = _table({"name": _text("^[a-z]([-a-z0-9]{0,13}[a-z0-9])?$"), "port": PORT}, ("name", "port"))
    variable = {
        "type": "object",
        "required": ["name"],
        "properties": {"name": TEXT, "value": {"type": ["string", "number", "boolean"]}, "valueFrom": TABLE},
    }
    group_settings = {key: value for key, value in worker["properties"].items() if key not in OF_PROCESS}
    group = {
        "name": {"type": "string", "pattern": DNS_LABEL, "maxLength": 20},
        "replicas": _count(1),
        "settings": _table(group_settings),
        **pod,
    }
    autoscaling = {
        "by": _one_of("", "hpa", "keda"),
        "minReplicas": _count(1),
        "maxReplicas": _count(1),
        "waitingPerWorker": {"type": "number", "minimum": 0},
        "timeToFirstTokenSeconds": {"type": "number", "minimum": 0},
        "scaleDownSeconds": _count(0),
        "prometheus": TEXT,
    }
    return {
        "fullnameOverride": {"type": "string", "pattern": SERVICE_NAME, "maxLength": 36},
        "clusterDomain": TEXT,
        "listenHost": TEXT,
        "image": _table(
            {
                "repository": _text(REPOSITORY),
                "tag": _text(TAG),
                "digest": _text("^(sha256:[0-9a-f]{64})?$"),
                "pullPolicy": _one_of("Always", "IfNotPresent", "Never"),
                "pullSecrets": TEXTS,
            }
        ),
        "config": {"type": "string", "description": "the text of a settings file (TOML)"},
        "settings": settings,
        "workers": {"type": "array", "items": _table(group, ("name", "replicas"))},
        "auth": _table({"keysSecret": TEXT, "clusterTokenSecret": TEXT}),
        "tls": _table(
            {
                "enabled": FLAG,
                "secrets": _table(dict.fromkeys(("router", "scheduler", "worker", "client"), TEXT)),
                "clientCertificates": FLAG,
            }
        ),
        "router": _table(
            {
                "replicas": _count(1),
                "service": _table(service),
                "extraPorts": {"type": "array", "items": extra_port},
                "preStopSeconds": _count(0),
                "disruptionBudget": budget,
                **pod,
            }
        ),
        "scheduler": _table(
            {
                "replicas": _count(1),
                "persistence": _table({"enabled": FLAG, "size": _text(QUANTITY), "storageClass": TEXT}),
                "disruptionBudget": budget,
                **pod,
            }
        ),
        "worker": _table(
            {"replicas": _count(1), "autoscaling": _table(autoscaling), "disruptionBudget": budget, **pod}
        ),
        "loadgen": _table(
            {
                "enabled": FLAG,
                "args": {"type": "array", "items": {"type": ["string", "number"]}},
                "apiKeySecret": TEXT,
                "ttlSecondsAfterFinished": _count(0),
                **pod,
            }
        ),
        "web": _table({"enabled": FLAG, "apiKeySecret": TEXT, **pod}),
        "networkPolicy": _table({"enabled": FLAG, "clients": OBJECTS, "page": OBJECTS, "metrics": OBJECTS}),
        "monitoring": _table(
            {
                "serviceMonitor": _table({"enabled": FLAG, "interval": _text(DURATION), "labels": LABELS}),
                "rules": _table({"enabled": FLAG, "labels": LABELS}),
                "dashboards": _table({"enabled": FLAG, "labels": LABELS, "annotations": LABELS}),
            }
        ),
        "serviceAccount": _table({"create": FLAG, "name": TEXT, "annotations": LABELS}),
        "extraEnv": {"type": "array", "items": variable},
        "extraVolumes": OBJECTS,
        "extraVolumeMounts": OBJECTS,
        "global": TABLE,
    }


def _settings() -> tuple[Schema, dict[str, Schema]]:
    """Return the schema of the settings that users set, and of their sections by class."""
    whole = _plain(Settings.model_json_schema())
    sections: dict[str, Schema] = whole["$defs"]
    for section, keys in OWNED.items():
        of = sections[Settings.model_fields[section].annotation.__name__] if section else whole  # type: ignore[union-attr]
        for key in keys:
            del of["properties"][key]
    used = json.dumps([whole["properties"], sections])
    kept = {name: section for name, section in sections.items() if f'"#/$defs/{name}"' in used}
    return _table(whole["properties"]), kept


def _plain(schema: Any) -> Any:  # noqa: ANN401  any part of a schema
    """Return a schema without titles, and with the choice between something and null as a choice of types."""
    if isinstance(schema, list):
        return [_plain(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {
        key: {name: _plain(part) for name, part in value.items()} if key in ("properties", "$defs") else _plain(value)
        for key, value in schema.items()
        if key != "title" or not isinstance(value, str)
    }
    match parts.get("anyOf"):
        case [{"type": str() as kind} as some, {"type": "null"}]:
            del parts["anyOf"]
            choices = {"enum": [*some["enum"], None]} if "enum" in some else {}
            return {**parts, **some, **choices, "type": [kind, "null"]}
    return parts
