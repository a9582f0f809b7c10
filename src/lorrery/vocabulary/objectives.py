"""The service level objectives: what counts against each, and its budget. deploy/prometheus/rules has the same ones.

A router counts its own requests (router/metrics.py), a simulation all of them; tests/view/test_alerts.py compares the
figures with those of Prometheus' rules.
"""

from typing import Final

MISSED_OUTCOMES = ("overloaded", "unattainable", "deadline", "unavailable", "fault", "failed")
"""Outcomes that count against `served`, of all requests that end so or are `ok`; others are not the cluster's doing."""
TTFT_SECONDS: Final = 2.5
"""Most until the first token, in device seconds."""
TPOT_SECONDS: Final = 0.1
"""Most per output token, in device seconds."""
LAG_SECONDS: Final = 0.1
"""Most that a frame of tokens may wait for a router's event loop, in wall seconds."""
BUDGETS = {"served": 0.01, "ttft": 0.05, "tpot": 0.05}
"""Share of requests that may miss each objective."""
LAG_BUDGET = 0.01
"""Share of the frames of tokens that may wait longer: their 99th percentile has the limit."""
MEANINGS = {
    "served": "answered",
    "ttft": f"with a first token within {TTFT_SECONDS:g} s",
    "tpot": f"at {TPOT_SECONDS:g} s or less per output token",
}
BURNS = ((14.4, 300.0, True), (6.0, 1_800.0, True), (3.0, 7_200.0, False))
"""How many times the budget, over how many seconds, is too much, and whether that is bad: the shorter window of each
alert LorreryErrorBudgetBurn."""
LONGEST_SECONDS = BURNS[-1][1]
