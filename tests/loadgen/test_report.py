import csv
import json
import math
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest
from rich.console import Console

from lorrery.loadgen.options import LoadOptions
from lorrery.loadgen.reception import ClusterView
from lorrery.loadgen.report import OwnLoad, OwnLoadMeter, make_report
from lorrery.loadgen.report_files import CSV_COLUMNS, in_json, write_report
from lorrery.loadgen.source import BuiltWorkload
from lorrery.loadgen.table import print_report
from lorrery.loadgen.workload.outcome import INTERRUPTED, OutcomeTable, RequestOutcome
from lorrery.loadgen.workload.request import WorkloadRequest

CLUSTER = ClusterView("Llama-2-7B", 2.0, 1, 1, 2048, 3072, (("A100", 2),))


def outcome(index, status="OK", adapter="lora-0", detail=""):
    at = np.array([index + 0.5, index + 0.6, index + 0.8])
    return RequestOutcome(
        index=index,
        prompt_tokens=20,
        intended_seconds=float(index),
        sent_seconds=index + 0.1,
        end_seconds=index + 0.8,
        status=status,
        adapter_id=adapter,
        message_seconds=at,
        message_tokens=np.array([1, 1, 2]),
        detail=detail,
        token_ids_crc32=255,
    )


def report(outcomes, *, cpu_share=0.1, interrupted=False, delay=0.0):
    return make_report(
        LoadOptions(target="there:1", workload="poisson"),
        BuiltWorkload([WorkloadRequest(0, 0.0, 20, 4)], "somebody's trace", ("adapters are synthetic",)),
        CLUSTER,
        OutcomeTable.of(outcomes),
        own_load=OwnLoad(10.0, cpu_share, cpu_share, delay),
        started_at=datetime(2026, 1, 2, tzinfo=UTC),
        interrupted=interrupted,
        num_skipped=0,
        num_warmup_failed=0,
    )


def printed(made, width=100):
    console = Console(width=width, record=True, file=None, force_terminal=False, quiet=False)
    with console.capture() as capture:
        print_report(made, console)
    return capture.get()


def test_a_summary_can_be_read_without_this_program(tmp_path):
    made = report([outcome(0), outcome(1, "UNAVAILABLE", detail="no worker")])
    summary, _ = write_report(made, tmp_path / "deep" / "er")
    content = json.loads(summary.read_text(encoding="utf-8"))
    assert content["format_version"] == 1
    assert content["options"]["target"] == "there:1"
    assert content["workload"]["attribution"] == "somebody's trace"
    assert "tpot_ms" in content["formulas"]
    assert content["summary"]["num_failed"] == 1
    assert content["summary"]["from_intended"]["ttft_ms"]["p50"] == pytest.approx(500)
    assert content["slora_summary"]["num_abort"] == 1
    assert content["started_at"] == "2026-01-02T00:00:00+00:00"


def test_a_summary_has_no_numbers_that_json_lacks():
    assert in_json({"limit": math.inf, "of": (1, math.nan, -math.inf, 2.5), "in": {"a": "inf"}}) == {
        "limit": "inf",
        "of": [1, None, "-inf", 2.5],
        "in": {"a": "inf"},
    }


def test_the_csv_has_a_line_per_request_in_workload_order(tmp_path):
    made = report([outcome(1), outcome(0, adapter=None)])
    _, requests = write_report(made, tmp_path)
    with requests.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == CSV_COLUMNS
    assert [row["index"] for row in rows] == ["0", "1"]
    first = rows[0]
    assert first["adapter_id"] == ""
    assert first["ttft_from_intended_ms"] == "500.000"
    assert first["ttft_from_sent_ms"] == "400.000"
    assert first["tpot_ms"] == "100.000"
    assert first["output_tokens"] == "4"
    assert first["token_ids_crc32"] == "000000ff"


def test_the_csv_has_priorities_if_a_request_has_one(tmp_path):
    _, requests = write_report(report([outcome(0), replace(outcome(1), priority=-2)]), tmp_path)
    with requests.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == (*CSV_COLUMNS, "priority")
    assert [row["priority"] for row in rows] == ["0", "-2"]


def test_the_table_fits_a_hundred_columns_and_says_what_matters():
    failed = [outcome(index, "RESOURCE_EXHAUSTED", f"lora-{index}", "queue is full " * 30) for index in range(3, 12)]
    made = report(
        [outcome(0), outcome(1), outcome(2, INTERRUPTED), *failed], cpu_share=0.9, interrupted=True, delay=0.2
    )
    text = printed(made)
    assert max(map(len, text.splitlines())) <= 100
    for part in (
        "2 x A100",
        "12 requests",
        "9 failed",
        "TTFT  from the intended send",
        "busiest 6 of 10",
        "somebody's trace",
        "9 x RESOURCE_EXHAUSTED",
        "used 90% of a core",
        "waited for a core 20%",
        "interrupted",
        "of device time",
    ):
        assert part in " ".join(text.split()) or part in text, part


LATENCIES_AT_80 = """
 ms                                    mean         p50         p90         p99
 ──────────────────────────────────────────────────────────────────────────────
 TTFT  from the intended send         500.0       500.0       500.0       500.0
 TTFT  from the actual send           400.0       400.0       400.0       400.0
 TPOT  (E2E - TTFT) / (n - 1)         100.0       100.0       100.0       100.0
 ITL   gap between tokens             100.0       100.0       100.0       100.0
 E2E   from the intended send         800.0       800.0       800.0       800.0
 E2E   from the actual send           700.0       700.0       700.0       700.0
 E2E / n, normalised TPOT             200.0       200.0       200.0       200.0
"""
LATENCIES_AT_60 = """
 ms                             mean    p50    p90    p99
 ────────────────────────────────────────────────────────
 TTFT  from the intended send  500.0  500.0  500.0  500.0
 TTFT  from the actual send    400.0  400.0  400.0  400.0
 TPOT  (E2E - TTFT) / (n - 1)  100.0  100.0  100.0  100.0
 ITL   gap between tokens      100.0  100.0  100.0  100.0
 E2E   from the intended send  800.0  800.0  800.0  800.0
 E2E   from the actual send    700.0  700.0  700.0  700.0
 E2E / n, normalised TPOT      200.0  200.0  200.0  200.0
"""
LATENCIES_AT_44 = """
 ms                       p50    p90    p99
 ──────────────────────────────────────────
 TTFT  from the         500.0  500.0  500.0
 intended send
 TTFT  from the actual  400.0  400.0  400.0
 send
"""
ADAPTERS_AT_80 = """
 adapter           requests   failed   tokens   TTFT p50   TTFT p90   TPOT p50
 ─────────────────────────────────────────────────────────────────────────────
 lora-0                   1        0        4      500.0      500.0      100.0
"""
ADAPTERS_AT_60 = """
                                     TTFT   TTFT   TPOT
 adapter  requests  failed  tokens    p50    p90    p50
 ──────────────────────────────────────────────────────
 lora-0          1       0       4  500.0  500.0  100.0
"""
ADAPTERS_AT_44 = """
                                     TTFT
 adapter  requests  failed  tokens    p50
 ────────────────────────────────────────
 lora-0          1       0       4  500.0
"""


def lines_at(width):
    made = report([outcome(index, adapter=f"lora-{index}") for index in range(3)])
    return "\n".join(line.rstrip() for line in printed(made, width).splitlines())


@pytest.mark.parametrize(
    ("width", "latencies", "adapters"),
    [
        (60, LATENCIES_AT_60, ADAPTERS_AT_60),
        (80, LATENCIES_AT_80, ADAPTERS_AT_80),
        (100, LATENCIES_AT_80, ADAPTERS_AT_80),
        (160, LATENCIES_AT_80, ADAPTERS_AT_80),
    ],
)
def test_every_column_is_there_whole_from_60_columns_on(width, latencies, adapters):
    text = lines_at(width)
    assert latencies in text
    assert adapters in text
    assert "left out" not in text


def test_the_three_commonest_failures_are_told_each_with_its_first_message():
    failed = ["NOT_FOUND", "UNAVAILABLE", "INTERNAL", "UNAVAILABLE", "OK", "INTERNAL", "INTERNAL", "ABORTED", "ABORTED"]
    outcomes = [outcome(index, status, detail=f"message {index}") for index, status in enumerate(failed)]
    assert report([*outcomes, outcome(9, INTERRUPTED)]).failures == (
        "3 x INTERNAL, request 2: message 2",
        "2 x ABORTED, request 7: message 7",
        "2 x UNAVAILABLE, request 1: message 1",
    )


def test_a_narrower_terminal_shows_fewer_columns_and_names_the_others():
    text = lines_at(44)
    assert LATENCIES_AT_44 in text
    assert "left out: mean; a terminal of 47 columns\nshows all\n" in text
    assert ADAPTERS_AT_44 in text
    assert "left out: TPOT p50, TTFT p90; a terminal of\n56 columns shows all\n" in text


def test_nothing_measured_shows_no_zeros():
    text = printed(report([outcome(0, "UNAVAILABLE")]))
    assert " 0.0 " not in text.split("tokens/s")[0]


def test_a_report_of_no_requests_is_still_json(tmp_path):
    summary, _ = write_report(report([]), tmp_path)
    json.loads(summary.read_text(), parse_constant=pytest.fail)


def test_own_load_counts_this_process():
    meter = OwnLoadMeter()
    sum(index * index for index in range(300_000))
    load = meter.read()
    assert load.cpu_share > 0
    assert load.peak_cpu_share >= load.cpu_share
    assert OwnLoad(1.0, 0.5, 0.6, None).warnings == ()
    assert len(OwnLoad(1.0, 0.5, 0.9, 0.2).warnings) == 2
