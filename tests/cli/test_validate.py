"""`lorrery validate golden`: what it accepts, what it says, how it exits."""

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lorrery.cli.app import app as lorrery
from lorrery.cli.validate import app
from lorrery.service.errors import SettingsError
from lorrery.service.files.shipped import golden_excerpts
from lorrery.validation import overview
from lorrery.validation.golden import replay
from lorrery.validation.golden.kind import Skip
from lorrery.validation.golden.kinds import KINDS

EXCERPTS = Path(__file__).parent.parent / "golden"
CLOSING_LINE = re.compile(r"\d+ passed, \d+ failed, \d+ skipped")


def golden(*files: Path) -> tuple[int, list[str]]:
    result = CliRunner().invoke(app, ["golden", *map(str, files)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output.splitlines()


def records(name: str) -> list[dict]:
    return [json.loads(line) for line in (EXCERPTS / f"{name}.jsonl").read_text().splitlines()]


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("command", ["steptime", "vidur", "slora", "kernels", "serving"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_compared(command: str):
    result = CliRunner().invoke(app, [command, "--json", "/nowhere/errors.json"])
    assert isinstance(result.exception, SettingsError)
    assert str(result.exception).startswith("--json /nowhere/errors.json: that is in /nowhere, which is no folder;")
    assert result.output == ""


@pytest.mark.parametrize("name", ["req_queue", "sampling_params", "llmmock_trie", "run_exp_metrics"])
def test_a_renamed_file_is_known_by_its_records(tmp_path, name):
    renamed = shutil.copy(EXCERPTS / f"{name}.jsonl", tmp_path / "vtc_req_queue.txt")

    exit_code, lines = golden(renamed)

    count = len(records(name))
    assert exit_code == 0
    assert lines == [str(renamed), f"  {name}: {count} passed", f"{count} passed, 0 failed, 0 skipped"]


def test_without_files_it_replays_the_shipped_excerpts():
    exit_code, lines = golden()

    assert exit_code == 0
    assert [line for line in lines if line.endswith(".jsonl")] == list(map(str, golden_excerpts()))
    assert lines[-1].endswith(" 0 failed, 0 skipped")


def test_one_file_may_hold_every_kind(tmp_path):
    rows = [row for name in ("length_limits", "llmmock_step_time", "req_queue") for row in records(name)[:2]]

    exit_code, lines = golden(write(tmp_path / "mixed.jsonl", *rows[::-1]))

    assert exit_code == 0
    assert lines[1:] == [
        "  req_queue: 2 passed",
        "  llmmock_step_time: 2 passed",
        "  length_limits: 2 passed",
        "6 passed, 0 failed, 0 skipped",
    ]


def test_no_record_is_of_two_kinds():
    for path in EXCERPTS.glob("*.jsonl"):
        for record in records(path.stem):
            assert sum(kind.detect(record) for kind in KINDS) == 1, (path.stem, record.get("id"))


def _swap_admitted(record: dict) -> None:
    next(round_ for round_ in record["rounds"] if round_["admitted"])["admitted"].append("r999")


def _shift_counter(record: dict) -> None:
    served = record["rounds"][-1]["served"]
    adapter_id = next(iter(served))
    served[adapter_id] += 0.5


def _shift_peak(record: dict) -> None:
    next(round_ for round_ in record["rounds"] if round_["checks"])["checks"][0][1] += 1


CORRUPTIONS = {
    "req_queue admitted": ("req_queue", _swap_admitted),
    "req_queue peak": ("req_queue", _shift_peak),
    "router_loop counter": ("router_loop", lambda record: record["steps"][0].update(hwt=7)),
    "router_loop finish": ("router_loop", lambda record: record["steps"][-2].update(finished=["r999"])),
    "router_loop left": ("router_loop", lambda record: record["left_waiting"].append("r999")),
    "sampling_params": ("sampling_params", lambda record: record.update(error="something else")),
    "length_limits": ("length_limits", lambda record: record.update(error="something else")),
    "trie size": ("llmmock_trie", lambda record: record.update(edges_before_prune=999)),
    "trie edges": ("llmmock_trie", lambda record: record["kept_edges"].append([999])),
    "vtc counter": ("vtc_req_queue", _shift_counter),
    "abort rate": ("abort_req_queue", lambda record: record["rounds"][0]["state"].update(approx_req_rate=99)),
    "abort drops": ("abort_req_queue", lambda record: record["rounds"][0]["deadline_aborted"].append("r999")),
    "cluster admitted": ("cluster_req_queue", _swap_admitted),
    "peft admitted": ("peft_req_queue", _swap_admitted),
    "pets admitted": ("pets_req_queue", _swap_admitted),
    "llm-mock steps": ("llmmock_scheduler", lambda record: record.update(steps=record["steps"] + 1)),
    "llm-mock times": ("llmmock_scheduler", lambda record: record["result"]["q0"].update(finish_s=1.0)),
    "step time": ("llmmock_step_time", lambda record: record.update(step_time_s=record["step_time_s"] * 1.00001)),
    "decode length": ("llmmock_decode_length", lambda record: record.update(decode_length=49)),
    "trace": ("trace_generate_requests", lambda record: record["req_time"].__setitem__(3, 0.25)),
    "metrics": ("run_exp_metrics", lambda record: record["result"].update(throughput=1.5)),
}


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_a_wrong_expectation_fails_and_names_the_case(tmp_path, corruption):
    name, corrupt = CORRUPTIONS[corruption]
    rows = [row for row in records(name) if row.get("policy", "slora") == "slora"]
    wrong = next(row for row in rows if any(round_["admitted"] for round_ in row.get("rounds", [{"admitted": 1}])))
    corrupt(wrong)
    wrong["id"] = "the-wrong-one"
    good = next(row for row in rows if row is not wrong)

    exit_code, lines = golden(write(tmp_path / "wrong.jsonl", good, wrong))

    assert exit_code == 1
    assert lines[-1] == "1 passed, 1 failed, 0 skipped"
    assert any("the-wrong-one (line 2)" in line for line in lines)
    assert any(line.startswith("      expected ") for line in lines)
    assert any(line.startswith("      got ") for line in lines)


def test_ambiguous_ties_are_compared_by_their_counts(tmp_path):
    record = next(row for row in records("llmmock_trie") if row["tie_ambiguous"])
    record["kept_edges"] = record["kept_edges"][:-1]

    exit_code, lines = golden(write(tmp_path / "trie.jsonl", record))

    assert exit_code == 1
    assert any("length of counts of kept_edges" in line for line in lines)


def test_many_failures_are_cut_short(tmp_path):
    rows = records("length_limits")[:8]
    for row in rows:
        row["error"] = "no"

    _, lines = golden(write(tmp_path / "wrong.jsonl", *rows))

    assert "    and 3 more failed" in lines
    assert lines[-1] == "0 passed, 8 failed, 0 skipped"


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_nothing_passed_is_a_failure(tmp_path, content):
    empty = tmp_path / "empty.jsonl"
    empty.write_text(content)

    exit_code, lines = golden(empty)

    assert exit_code == 1
    assert lines == [str(empty), f"no records in {empty}", "0 passed, 0 failed, 0 skipped"]


def test_an_empty_file_among_good_ones_is_a_failure_that_names_it(tmp_path):
    good, empty = EXCERPTS / "req_queue.jsonl", tmp_path / "empty.jsonl"
    empty.touch()

    exit_code, lines = golden(good, empty, good)

    assert exit_code == 1
    assert lines[-2] == f"no records in {empty}"


class NotThereYet:
    name = "ring_queue"

    def detect(self, record):
        return "ring" in record

    def replay(self, record):
        return Skip("not modelled yet: the ring queue")


def test_a_part_that_does_not_exist_yet_is_skipped_with_the_reason_and_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(replay, "KINDS", (*KINDS, NotThereYet()))
    rows = [records("length_limits")[0], {"ring": 1}, {"ring": 2}]

    exit_code, lines = golden(write(tmp_path / "mixed.jsonl", *rows))

    assert exit_code == 1
    assert lines[-2:] == [
        "skipped 2 of ring_queue: not modelled yet: the ring queue",
        "1 passed, 0 failed, 2 skipped",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "x", ', "not JSON: "),
        ("[1, 2]", "a golden record is a JSON object, and this is list"),
        ('{"id": "x", "colour": 1}', "no known kind of golden record has these fields: colour, id"),
        ('{"prompt_len": null, "decode_length": 5}', "cannot be replayed: TypeError: "),
    ],
)
def test_a_line_that_cannot_be_replayed_is_named_and_the_rest_goes_on(tmp_path, line, message):
    path = tmp_path / "odd.jsonl"
    good = json.dumps(records("length_limits")[0])
    path.write_text(f"{good}\n\n{line}\n{good}\n")

    exit_code, lines = golden(path)

    assert exit_code == 1
    assert any(f"{path}:3: {message}" in shown for shown in lines)
    assert lines[-1] == "2 passed, 1 failed, 0 skipped"


def test_a_file_that_is_no_text_is_a_failure(tmp_path):
    path = tmp_path / "binary.jsonl"
    path.write_bytes(b"\x1f\x8b\xff\xfe")

    exit_code, lines = golden(path)

    assert exit_code == 1
    assert any(f"{path}: cannot be read: " in line for line in lines)
    assert lines[-1] == "0 passed, 1 failed, 0 skipped"


def test_a_missing_file_is_a_usage_error(tmp_path):
    result = CliRunner().invoke(app, ["golden", str(tmp_path / "missing.jsonl")])

    assert result.exit_code == 2


def test_several_files_share_one_closing_line():
    exit_code, lines = golden(EXCERPTS / "length_limits.jsonl", EXCERPTS / "req_queue.jsonl")

    assert exit_code == 0
    assert [line for line in lines if CLOSING_LINE.fullmatch(line)] == [lines[-1]]
    assert lines[-1] == f"{len(records('length_limits')) + len(records('req_queue'))} passed, 0 failed, 0 skipped"


def test_the_lorrery_command_leads_here():
    result = CliRunner().invoke(lorrery, ["validate", "golden", str(EXCERPTS / "length_limits.jsonl")])

    assert result.exit_code == 0
    assert result.output.splitlines()[-1] == f"{len(records('length_limits'))} passed, 0 failed, 0 skipped"


@pytest.fixture
def few_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave of the files whose rows are simulated a few rows each."""
    for name, every in (("MEASURED_SERVING", 40), ("SLORA_RUNS", 100), ("SERVED_LORA", 40)):
        heading, *rows = getattr(overview, name).read_text(encoding="utf-8").splitlines()
        path = tmp_path / name
        path.write_text("\n".join([heading, *rows[::every]]) + "\n", encoding="utf-8")
        monkeypatch.setattr(overview, name, path)


@pytest.mark.usefixtures("few_runs")
def test_without_a_command_every_check_is_made_and_says_how_far_off_the_model_is():
    result = CliRunner().invoke(lorrery, ["validate"], env={"COLUMNS": "200"})

    assert result.exit_code == 0, result.output
    heading, *lines = [line for line in result.stdout.splitlines() if line.strip()]
    assert heading.split("  ")[0] == "lorrery validate"
    commands = [line.split()[0] for line in lines[:-1] if not line.startswith(" ")]
    assert commands == ["golden", "slora", "vidur", "kernels", "steptime", "serving", "lora"]
    assert sum("all exactly the same" in line for line in lines) == 1
    assert sum(bool(re.search(r" [\d,]+ +[\d.]+%( at most)?$", line)) for line in lines) == len(lines) - 2


@pytest.mark.usefixtures("few_runs")
def test_a_decision_that_differs_is_told_and_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    row = records("length_limits")[0]
    wrong = write(tmp_path / "wrong.jsonl", {**row, "error": "none of that"})
    monkeypatch.setattr(overview, "golden_excerpts", lambda: [wrong])

    result = CliRunner().invoke(lorrery, ["validate"], env={"COLUMNS": "200"})

    assert result.exit_code == 1
    assert re.search(r"golden .* 1 +1 differ$", result.stdout, re.MULTILINE)


def test_the_figures_are_those_of_each_check_by_itself():
    made = {name: list(check()) for name, check in overview.checks().items() if name in ("kernels", "steptime")}
    assert [line.what.partition(": ")[2] for line in made["steptime"]] == [
        "linear layers alone",
        "decode steps",
        "prefill steps",
        "mixed steps",
    ]
    assert all(line.num_cases > 50 for lines in made.values() for line in lines)
    gemm = next(line for line in made["kernels"] if line.what.endswith(": gemm"))
    assert 5 < float(gemm.result.removesuffix("%")) < 15
