"""Tables, code and docs/metrics.md agree; names, units and labels keep the rules.

A live cluster is held to the same tables in tests/cluster/test_generate.py.
"""

import re

import pytest

from lorrery.service.telemetry.series import Series
from lorrery.service.telemetry.tracing import SPANS
from tests.deploy.exported import EXPORTED, TABLES, exported, families, in_table, shown_name
from tests.deploy.files import ROOT

SERVICES = ("router", "scheduler", "worker", "loadgen")
BOUNDED_LABELS = {
    *("adapter", "cause", "gpu", "kind", "level", "model", "outcome", "phase", "reason", "shard", "state", "status"),
    *("tenant", "tensor_parallel", "tier", "worker"),
}

UNITS = {
    "_wall_seconds": {"wall seconds"},
    "_cpu_seconds": {"CPU seconds"},
    "_seconds": {"device seconds", "wall seconds", "CPU seconds", "Unix seconds"},
    "_tokens": {"tokens"},
    "_bytes": {"bytes"},
    "_requests": {"requests"},
    "_sequences": {"sequences"},
    "_adapters": {"adapters"},
    "_batch_size": {"sequences"},
}
"""What the unit may be of a name that ends so (before `_total`); the longest ending decides."""

SERIES = [*(one for series, _ in TABLES.values() for one in series), SPANS]


@pytest.mark.parametrize("part", EXPORTED)
def test_what_is_exported_is_the_table(part: str):
    assert exported(part) == in_table(part)


def test_page_lists_every_series_once():
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([a-z0-9_]+)` \|", page, re.MULTILINE) == [one.name for one in SERIES]


@pytest.mark.parametrize("one", SERIES, ids=lambda one: one.name)
def test_series_has_a_unit_that_fits_its_name_and_a_sentence_of_help(one: Series):
    base = one.name.removesuffix("_total")
    endings = [ending for ending in UNITS if base.endswith(ending)]
    if endings:
        assert one.unit in UNITS[max(endings, key=len)]
    assert one.unit
    assert re.match(r"[A-Z0-9(]", one.help)
    if one.name.startswith("lorrery_"):
        assert one.help.endswith(".")
    assert not re.search(r"[`\[\]|]", one.help), "Prometheus shows no Markdown"
    assert list(one.buckets) == sorted(set(one.buckets))


@pytest.mark.parametrize("part", EXPORTED)
def test_every_metric_shows_something_from_the_start(part: str):
    for family in families(part):
        assert family.samples, f"{family.name} is empty until something happens"


@pytest.mark.parametrize("service", SERVICES)
def test_names_say_service_and_unit(service: str):
    for family in families(service):
        name = shown_name(family)
        assert re.fullmatch(rf"lorrery_{service}_[a-z0-9_]+", name)
        assert not re.search(r"_(ms|us|ns|ps|milli\w+|micro\w+|pico\w+|minutes|percent|kb|mb|gb|count|sum)(_|$)", name)
        if family.type == "histogram":
            assert name.endswith(("_seconds", "_tokens", "_batch_size")), name


@pytest.mark.parametrize("service", SERVICES)
def test_labels_are_bounded(service: str):
    for name, one in exported(service).items():
        assert one.labels <= BOUNDED_LABELS, name
