"""Rules ask for what exists; every alert says what to do and is tested both ways (promtool: test_prometheus.py)."""

import re

import yaml

from tests.deploy.asked import check_series, check_values, recorded, rules
from tests.deploy.files import ROOT

CASES = yaml.safe_load((ROOT / "tests" / "deploy" / "rules" / "alerts_test.yml").read_text(encoding="utf-8"))["tests"]
ALERTS = [rule for rule in rules() if "alert" in rule]
NAMES = {rule["alert"] for rule in ALERTS}
PAGE = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")


def test_rules_ask_only_for_series_and_values_that_exist() -> None:
    for rule in rules():
        if not rule["expr"].startswith("vector("):
            check_series(rule.get("alert") or rule["record"], rule["expr"])
            check_values(rule.get("alert") or rule["record"], rule["expr"])


def test_every_recorded_series_is_used() -> None:
    boards = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "deploy" / "grafana").rglob("*.json"))
    everything = boards + "".join(rule["expr"] for rule in rules())
    assert not {name for name in recorded() if name not in everything}


def test_every_alert_says_how_bad_it_is_what_it_saw_and_what_to_do() -> None:
    for rule in ALERTS:
        assert rule["labels"]["severity"] in {"page", "ticket"}, rule["alert"]
        notes = rule["annotations"]
        assert notes.keys() == {"summary", "description", "runbook"}
        assert "{{ $" in notes["summary"] or rule["alert"] == "LorreryNoWorkers"
        assert notes["runbook"] == f"docs/monitoring.md#{rule['alert'].lower()}"


def test_the_page_has_an_entry_for_every_alert_and_for_no_other() -> None:
    found = re.findall(r'^\* <a id="(\w+)"></a>\*\*(Lorrery\w+)\.\*\*', PAGE, re.MULTILINE)
    assert found == [(name.lower(), name) for _, name in found]
    assert {name for _, name in found} == NAMES


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    fires, silent = set(), set()
    for case in CASES:
        for asked in case.get("promql_expr_test", []):
            fires |= {name for name in NAMES if name in asked["expr"] and asked["exp_samples"]}
        for asked in case.get("alert_rule_test", []):
            assert asked["exp_alerts"] == []
            silent.add(asked["alertname"])
    assert fires == silent == NAMES
