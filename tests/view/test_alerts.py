"""Page, terminal and Prometheus have the same rules: each alert has a rule with its limits, or a reason why not."""

import re
from types import SimpleNamespace
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from lorrery.router.faults import Injector
from lorrery.router.metrics import RouterMetrics
from lorrery.router.request import Request
from lorrery.service.faults.kinds import parse_fault
from lorrery.service.settings.cluster import Settings
from lorrery.view import figures, rules
from lorrery.vocabulary import objectives
from tests.deploy.asked import rules as prometheus_rules
from tests.deploy.files import ROOT

ALERTS = [rule for rule in prometheus_rules() if "alert" in rule]
PAGE = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")

LIMITS: dict[str, list[list[float]]] = {
    "LorreryErrorBudgetBurn": [[rate] * 2 for rate, _, _ in objectives.BURNS],
    "LorreryQueueGrows": [[0]],
    "LorreryQueueStuck": [[0, 0]],
    "LorreryKvPressure": [[rules.FULL_RATIO, 0]],
    "LorreryPreemptions": [[rules.PREEMPTION_RATIO]],
    "LorreryAdapterThrash": [[rules.THRASH_RATIO, rules.THRASH_LOADS_PER_SECOND]],
    "LorreryAdapterLoadsFail": [[0]],
    "LorreryWorkerLost": [[0]],
    "LorreryNoWorkers": [[0]],
    "LorreryNoScheduler": [[0, 0]],
    "LorreryTargetDown": [[0]],
    "LorreryBehindPace": [[rules.LATE_RATIO]],
    "LorrerySlowWorker": [[1, rules.SLOW_RATIO]],
    "LorreryRouterLags": [[1 - objectives.LAG_BUDGET, objectives.LAG_SECONDS]],
    "LorreryTenantRefused": [[rules.REFUSED_RATIO]],
    "LorreryTenantStarved": [[rules.STARVED_SECONDS, rules.STARVED_RATIO]],
}
"""Of the alerts that a rule stands for, the numbers in each expression of that name, in order."""
WINDOWS = {
    "LorreryQueueStuck": {f"{rules.SILENT_SECONDS / 60:g}m"},
    "LorreryErrorBudgetBurn": set(),
}
"""Windows in expressions other than the usual one; those of the error budgets are in the names of recorded series."""


def numbers(expression: str) -> list[float]:
    plain = re.sub(r'"[^"]*"|\[\w+\]|#.*|[a-z_]\w*(:\w+)*', " ", expression)
    return [float(number) for number in re.findall(r"[\d.]+", plain)]


def test_every_alert_has_a_rule_or_a_reason_why_not() -> None:
    names = {rule["alert"] for rule in ALERTS}
    assert rules.rules_of_alerts().keys() == LIMITS.keys()
    assert names == LIMITS.keys() | rules.UNSEEN_ALERTS.keys()
    assert not LIMITS.keys() & rules.UNSEEN_ALERTS.keys()


@pytest.mark.parametrize("name", LIMITS)
def test_a_rule_has_the_limits_and_the_window_of_its_alert(name: str) -> None:
    expressions = [rule["expr"] for rule in ALERTS if rule["alert"] == name]
    assert [numbers(one) for one in expressions] == LIMITS[name]
    windows = {window for one in expressions for window in re.findall(r"\[(\w+)\]", one)}
    assert windows <= WINDOWS.get(name, {f"{figures.ALERT_SECONDS / 60:g}m"})


def test_an_error_budget_has_the_shorter_window_of_its_alert() -> None:
    units = {"m": 60, "h": 3600}
    for (_, seconds, is_bad), rule in zip(objectives.BURNS, ALERTS, strict=False):
        windows = [int(size) * units[unit] for size, unit in re.findall(r"rate(\d+)([mh])\b", rule["expr"])]
        assert min(windows) == seconds
        assert (rule["labels"]["severity"] == "page") == is_bad


def test_objectives_count_what_prometheus_counts() -> None:
    recorded = [rule for rule in prometheus_rules() if "record" in rule]
    budgets = {
        rule["labels"]["slo"]: numbers(rule["expr"])[0]
        for rule in recorded
        if rule["record"] == "lorrery:slo_budget:ratio"
    }
    assert budgets == objectives.BUDGETS
    missed = "|".join(objectives.MISSED_OUTCOMES)
    for rule in recorded:
        if rule["record"].startswith("lorrery:slo_misses:"):
            asked = {
                "served": [missed, f"ok|{missed}"],
                "ttft": [f"{objectives.TTFT_SECONDS}"],
                "tpot": [f"{objectives.TPOT_SECONDS}"],
            }
            assert re.findall(r'"([^"]+)"', rule["expr"]) == asked[rule["labels"]["slo"]]


def test_a_router_counts_its_requests_against_the_objectives() -> None:
    metrics = RouterMetrics(CollectorRegistry())
    for outcome in ("ok", "ok", "cancelled", "invalid", "fault", "over_quota"):
        metrics.request_ended(outcome)
    for ttft, tpot in ((0.2, 0.02), (2.5, 0.1), (2.6, 0.2)):
        metrics.ttft.observe(ttft)
        metrics.tpot.observe(tpot)
    metrics.lag.observe_each([0.01, 0.5])
    assert metrics.objectives() == [("served", 3, 1), ("ttft", 3, 1), ("tpot", 3, 1), ("lag", 2, 1)]


def test_the_page_about_monitoring_lists_every_rule() -> None:
    listed = {name.strip("* ") for name in re.findall(r"^\| ([^|]+) \|", PAGE, re.MULTILINE)}
    assert {name for name, *_ in rules.RULES} <= listed


def test_the_faults_that_a_router_shows_are_those_that_still_apply() -> None:
    injector = Injector(Settings(model="Llama-2-7B"), RouterMetrics(CollectorRegistry()))
    rules = ["refuse,first=1", "delay,at=3600,seconds=1", "stall,after=1,seconds=1,tenant=acme"]
    injector.take(map(parse_fault, rules), add=False)
    assert [fault.text for fault, _ in injector.active] == [rules[0], rules[2]]
    injector.choose(cast("Request", SimpleNamespace(tenant_id="", adapter_id="")), ())
    assert [(fault.text, num_met) for fault, num_met in injector.active] == [(rules[2], 0)]
