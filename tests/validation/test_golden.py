"""Every golden record goes through the shipped code: committed excerpts anywhere, the whole files where they are."""

import os
from pathlib import Path

import pytest

from lorrery.validation.golden.kinds import KINDS
from lorrery.validation.golden.replay import UNKNOWN, FileReport, replay_files

EXCERPTS = sorted((Path(__file__).parents[1] / "golden").glob("*.jsonl"))
PROJECT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("LORRERY_SHARED") or PROJECT.parent / "shared") / "golden"

CASES = {
    "abort_req_queue": 100,
    "cluster_req_queue": 100,
    "length_limits": 120,
    "llmmock_decode_length": 65,
    "llmmock_scheduler": 40,
    "llmmock_step_time": 70,
    "llmmock_trie": 60,
    "peft_req_queue": 70,
    "pets_req_queue": 36,
    "req_queue": 240,
    "router_loop": 90,
    "run_exp_metrics": 30,
    "sampling_params": 100,
    "sglang_scheduler": 150,
    "trace_generate_requests": 9,
    "vllm_rules": 21,
    "vllm_scheduler": 300,
    "vtc_req_queue": 100,
}
"""Number of records in each whole file."""
OWN = {"vllm_kv_events"}
"""Recorded here (`lorrery validate golden --against`), and kept whole."""
_KINDS = {"vllm_rules": "vllm_scheduler", "vllm_kv_events": "vllm_scheduler"}


def replay(path: Path) -> FileReport:
    (report,) = replay_files([path]).files
    return report


def assert_reproduced(report: FileReport) -> int:
    """Every record passes."""
    assert UNKNOWN not in report.kinds
    num_records = 0
    for kind in report.kinds.values():
        assert kind.failures == []
        assert kind.skip_reasons == []
        assert kind.kind.split("/")[0] == _KINDS.get(report.path.stem, report.path.stem)
        num_records += kind.passed
    return num_records


@pytest.mark.parametrize("path", EXCERPTS, ids=lambda path: path.stem)
def test_committed_excerpt_is_reproduced(path):
    assert assert_reproduced(replay(path)) > 0


def test_every_golden_file_has_an_excerpt():
    assert {path.stem for path in EXCERPTS} == {*CASES, *OWN}


def test_every_kind_occurs_in_the_excerpts():
    reports = replay_files(EXCERPTS).files
    assert {kind for report in reports for kind in report.kinds} == {kind.name for kind in KINDS}


@pytest.mark.parametrize("name", CASES)
def test_whole_file_is_reproduced(name):
    path = SHARED / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is missing: set LORRERY_SHARED to the folder that holds golden/")
    assert assert_reproduced(replay(path)) == CASES[name]


def test_brackets_nested_beyond_what_python_reads_are_refused(tmp_path):
    path = tmp_path / "brackets.jsonl"
    path.write_text("[" * 20_000)
    assert "nested too deeply" in repr(replay_files([path]))
