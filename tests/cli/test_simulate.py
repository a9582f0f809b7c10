"""`lorrery simulate`: its report is load's, its results repeat, and what goes wrong goes wrong on time."""

import csv
import json
import signal
import subprocess
import sys
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lorrery.cli.simulate import app
from lorrery.loadgen.report_files import CSV_COLUMNS
from lorrery.scheduler.core.admission import AdmissionPass
from lorrery.scheduler.core.queues.fifo import Fifo
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence
from lorrery.service.errors import LorreryError, SettingsError
from tests.simulator.recorded import run as run_journal

CONFIG = ["--config", str(Path(__file__).parents[2] / "deploy" / "cluster.toml")]
TRACES = Path(__file__).parents[2] / "deploy" / "traces"


def read_report(folder: Path) -> dict[str, Any]:
    """Return a run's summary."""
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def run(*arguments: str, code: int = 0, config: Many[str] = CONFIG) -> str:
    result = CliRunner().invoke(app, [*config, *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def rows(folder: Path, name: str = "requests.csv") -> list[dict[str, str]]:
    with (folder / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_the_report_is_that_of_a_live_run(tmp_path: Path) -> None:
    output = run("--rate", "5", "--duration", "20", "--adapters", "all", "--out", str(tmp_path))
    assert "poisson simulated: Llama-3-8B, 2 x H100-SXM" in output
    report = read_report(tmp_path)
    summary = report["summary"]
    assert summary["num_completed"] == summary["num_requests"]
    assert summary["num_failed"] == 0
    assert summary["tokens_per_message"] == 1
    assert report["simulation"]["num_workers"] == 2
    assert report["kind"] == "lorrery simulate"
    assert "Llama-3-8B on 2 x H100-SXM" in (tmp_path / "report.html").read_text(encoding="utf-8")
    requests = rows(tmp_path)
    assert tuple(requests[0]) == CSV_COLUMNS
    assert len(requests) == summary["num_requests"]
    assert sum(int(row["output_tokens"]) for row in requests) == summary["output_tokens"]
    # With one message a token, gaps and tokens tell the same.
    assert summary["itl_ms"]["count"] == summary["output_tokens"] - summary["num_requests"]


def test_a_run_repeats_byte_for_byte_and_stepping_changes_nothing(tmp_path: Path) -> None:
    asked = ["-n", "60", "--rate", "20", "--adapters", "all", "--steps", "--perfetto"]
    for name, more in (("one", []), ("two", []), ("stepped", ["--one-step"])):
        run(*asked, *more, "--no-report", "--out", str(tmp_path / name))
    assert not (tmp_path / "one" / "report.html").exists()
    for file in ("requests.csv", "steps.csv", "trace.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    assert (tmp_path / "one/requests.csv").read_bytes() == (tmp_path / "stepped/requests.csv").read_bytes()
    one, stepped = (
        {row["worker"] + row["step"]: row for row in rows(tmp_path / n, "steps.csv")} for n in ("one", "stepped")
    )
    for row in (*one.values(), *stepped.values()):
        del row["waiting_sequences"]  # a jump tells who waits at its beginning
    assert one == stepped


def test_every_step_is_written_and_the_trace_can_be_read(tmp_path: Path) -> None:
    run("-n", "20", "--trace", "--steps", "--out", str(tmp_path))
    steps, requests = rows(tmp_path, "steps.csv"), rows(tmp_path)
    decoded = sum(int(row["decode_sequences"]) for row in steps)
    assert decoded == sum(int(row["output_tokens"]) - 1 for row in requests)
    assert sum(int(row["prefill_tokens"]) for row in steps) == sum(int(row["prompt_tokens"]) for row in requests)
    assert all(int(row["end_ps"]) - int(row["start_ps"]) == int(row["step_ps"]) for row in steps)
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    slices = [event for event in events if event["ph"] == "X"]
    assert sum(event["args"]["steps"] for event in slices) == len(steps)
    assert {event["name"].split()[0] for event in slices} == {"prefill", "decode"}
    assert (
        sum(event["ph"] == "b" for event in events) == sum(event["ph"] == "e" for event in events) == 4 * len(requests)
    )


def test_trace_with_a_file_is_the_workloads_as_in_load(tmp_path: Path) -> None:
    trace = str(TRACES / "azure_llm_2023_conv_excerpt.csv.gz")
    output = run("--workload", "azure", "--trace", trace, "-n", "30", "--trace", "--out", str(tmp_path))
    assert "Azure Public Dataset" in output
    assert (tmp_path / "trace.json").exists()
    mooncake = str(TRACES / "mooncake_conversation_excerpt.jsonl")
    cached = ["--set", "scheduler.prefix_cache.kind=blocks", "--skip-too-long", "-n", "60"]
    run("--workload", "mooncake", "--trace", mooncake, *cached, "--out", str(tmp_path))
    assert read_report(tmp_path)["summary"]["cached_tokens"] > 0


def test_a_closed_loop_keeps_its_clients_busy(tmp_path: Path) -> None:
    run("-c", "4", "-n", "40", "--workers", "1", "--out", str(tmp_path))
    requests = rows(tmp_path)
    assert len(requests) == 40
    times = [(float(row["sent_seconds"]), float(row["end_seconds"])) for row in requests]
    assert max(sum(sent <= at < end for sent, end in times) for at, _ in times) == 4
    ends = {f"{end:.6f}" for _, end in times}
    assert all(sent == 0 or f"{sent:.6f}" in ends for sent, _ in times)


def test_warm_up_requests_are_in_no_figure(tmp_path: Path) -> None:
    run("-n", "10", "--warmup", "5", "--adapters", "all", "--out", str(tmp_path))
    assert [row["index"] for row in rows(tmp_path)] == [str(index) for index in range(10)]
    assert float(rows(tmp_path)[0]["sent_seconds"]) < 5
    run("--workload", "constant", "--rate", "4", "-n", "5", "--warmup", "5", "--out", str(tmp_path))
    assert [float(row["sent_seconds"]) for row in rows(tmp_path)] == [0, 0.25, 0.5, 0.75, 1]


def test_a_fault_after_the_end_of_the_run_is_told(tmp_path: Path) -> None:
    early, late = "slow_worker,at=1,worker=worker-0,factor=1.5", "worker_loss,at=500,worker=worker-1"
    output = run("-n", "20", "--fault", early, "--fault", late, "--out", str(tmp_path))
    report = read_report(tmp_path)
    end = report["simulation"]["simulated_seconds"]
    (warning,) = report["warnings"]
    assert warning.startswith(f"the fault {late} had no effect: the run ended at {end:.1f} s; let it begin earlier")
    assert "had no effect" in output


def test_the_shipped_excerpts_run_with_the_shipped_settings(tmp_path: Path) -> None:
    for workload, num_skipped in (("azure", 0), ("mooncake", 107)):
        run("--workload", workload, "--out", str(tmp_path))
        assert read_report(tmp_path)["workload"]["num_skipped"] == num_skipped
    (warning,) = read_report(tmp_path)["warnings"]
    assert warning == "107 requests are longer than the cluster's limits and were left out"
    run("--workload", "mooncake", "--keep-too-long", "--out", str(tmp_path), code=1)


def test_refusals_of_too_long_requests_say_what_to_do(tmp_path: Path) -> None:
    mooncake = ["--workload", "mooncake", "--trace", str(TRACES / "mooncake_conversation_excerpt.jsonl")]
    run(*mooncake, "--out", str(tmp_path), code=1)
    (warning,) = read_report(tmp_path)["warnings"]
    assert warning.startswith("107 of 200 requests are longer than the cluster takes (scheduler.max_req_input_len 8192")
    assert "leave them out with --skip-too-long, or raise these and batch_max_tokens" in warning
    run(*mooncake, "--skip-too-long", "--out", str(tmp_path))
    limits = [f"--set=scheduler.{name}=131072" for name in ("max_req_total_len", "batch_max_tokens")]
    run(*mooncake, "--set", "scheduler.max_req_input_len=130000", *limits, "--out", str(tmp_path))
    assert read_report(tmp_path)["warnings"] == []


def test_a_lost_workers_requests_run_on_elsewhere(tmp_path: Path) -> None:
    fault = ["--fault", "worker_loss,at=5,worker=worker-1,for=5"]
    output = run("--rate", "20", "--duration", "20", *fault, "--out", str(tmp_path))
    assert "worker_loss,at=5,worker=worker-1,for=5" in output
    report = read_report(tmp_path)
    assert report["summary"]["num_completed"] == report["summary"]["num_requests"]
    assert report["summary"]["num_requeues"] > 0
    admitted = [
        float(row["sent_seconds"]) + float(row["queue_seconds"]) + float(row["adapter_load_seconds"])
        for row in rows(tmp_path)
        if row["worker_id"] == "worker-1"
    ]
    assert not any(5 <= at < 10 for at in admitted)
    assert any(at >= 10 for at in admitted)


def test_without_any_worker_requests_wait_and_then_fail(tmp_path: Path) -> None:
    fault = ["--fault", "worker_loss,at=0,worker=worker-0,for=40", "--workers", "1"]
    run("--workload", "constant", "--rate", "1", "--duration", "45", *fault, "--out", str(tmp_path), code=1)
    status = [row["status"] for row in rows(tmp_path)]
    assert status[:10] == ["UNAVAILABLE"] * 10  # worker_wait_seconds is 30
    assert set(status[10:]) == {"OK"}


def test_the_wait_for_a_worker_begins_anew_with_each_loss(tmp_path: Path) -> None:
    one = ["--workload", "constant", "--rate", "1", "-n", "1", "--input-range", "100", "--output-range", "1000"]

    def row_if_back_at(seconds: int) -> dict[str, str]:
        lost = (0, 10), (12, seconds)  # worker_wait_seconds is 30, so the first wait would have ended at 30
        faults = [f"--fault=worker_loss,at={at},worker=worker-0,for={until - at}" for at, until in lost]
        run(*one, "--workers", "1", *faults, "--out", str(tmp_path), code=int(seconds > 42))
        return rows(tmp_path)[0]

    served, given_up = row_if_back_at(41), row_if_back_at(43)
    assert (served["status"], served["output_tokens"]) == ("OK", "1000")
    assert (given_up["status"], float(given_up["end_seconds"])) == ("UNAVAILABLE", 42)
    assert (served["num_requeues"], given_up["num_requeues"]) == ("1", "1")


def test_a_slow_worker_gets_less_to_do(tmp_path: Path) -> None:
    fault = ["--fault", "slow_worker,at=0,worker=worker-0,factor=3"]
    run("--rate", "20", "--duration", "20", *fault, "--out", str(tmp_path))
    by_worker = [row["worker_id"] for row in rows(tmp_path)]
    assert 0 < by_worker.count("worker-0") < by_worker.count("worker-1")


@pytest.mark.parametrize("order", [1, -1])
def test_a_fault_may_begin_when_another_of_its_worker_ends(tmp_path: Path, order: int) -> None:
    one = ["--workload", "constant", "--rate", "1", "-n", "1", "--input-range", "100", "--output-range", "1000"]
    faults = [
        "--fault=slow_worker,at=1,worker=worker-0,factor=2,for=2",
        "--fault=slow_worker,at=3,worker=worker-0,factor=3,for=2",
    ]
    run(*one, "--steps", "--out", str(tmp_path / "without"))
    run(*one, "--steps", *faults[::order], "--out", str(tmp_path / "with"))
    pairs = zip(rows(tmp_path / "without", "steps.csv"), rows(tmp_path / "with", "steps.csv"), strict=True)
    factors = [(int(slow["start_ps"]) / 1e12, int(slow["step_ps"]) / int(plain["step_ps"])) for plain, slow in pairs]
    for begin, end, factor in ((0, 1, 1), (1, 3, 2), (3, 5, 3), (5, 100, 1)):
        within = [found for at, found in factors if begin <= at < end]
        assert within == [factor] * len(within)
        assert len(within) > 10


def test_adapters_that_do_not_load_fail_their_requests(tmp_path: Path) -> None:
    fault = ["--fault", "adapter_load_failure,at=0,adapter=lora-r8-0,for=5"]
    run("--rate", "20", "--duration", "20", "--adapters", "lora-r8-{0..1}", *fault, "--out", str(tmp_path), code=1)
    failed = [row for row in rows(tmp_path) if row["status"] != "OK"]
    assert {row["adapter_id"] for row in failed} == {"lora-r8-0"}
    assert max(float(row["end_seconds"]) for row in failed) < 6


def test_deadlines_and_limits_are_kept(tmp_path: Path) -> None:
    run("--rate", "400", "--duration", "5", "--timeout", "4", "--workers", "1", "--out", str(tmp_path), code=1)
    late = [row for row in rows(tmp_path) if row["status"] == "DEADLINE_EXCEEDED"]
    assert late
    assert all(float(row["end_seconds"]) - float(row["sent_seconds"]) == pytest.approx(4) for row in late)
    few = ["--set", "scheduler.max_waiting_requests=5", "--set", "scheduler.running_max_req_size=4"]
    run("--rate", "50", "--duration", "5", "--workers", "1", *few, "--out", str(tmp_path), code=1)
    assert "RESOURCE_EXHAUSTED" in read_report(tmp_path)["summary"]["by_status"]
    run("-n", "5", "--input-range", "9000", "--output-range", "10", "--out", str(tmp_path), code=1)
    assert read_report(tmp_path)["summary"]["by_status"] == {"INVALID_ARGUMENT": 5}


def test_adapters_stay_with_their_scheduler_where_its_load_does_not_matter(tmp_path: Path) -> None:
    alone = ("--set", "router.max_shard_load=inf")
    run("-n", "100", "--shards", "2", "--workers", "4", "--adapters", "all", *alone, "--out", str(tmp_path))
    shard_of: dict[str, set[int]] = {}
    for row in rows(tmp_path):
        shard_of.setdefault(row["adapter_id"], set()).add(int(row["worker_id"].removeprefix("worker-")) % 2)
    assert all(len(shards) == 1 for shards in shard_of.values())
    assert {shard for shards in shard_of.values() for shard in shards} == {0, 1}


def test_each_scheduler_counts_its_own_queue(tmp_path: Path) -> None:
    few = ["--set", "scheduler.max_waiting_requests=5", "--set", "scheduler.running_max_req_size=4"]
    asked = ["--rate", "200", "--duration", "2", "--shards", "2", "--workers", "2", *few]
    for adapter in ("lora-r8-0", "lora-r8-1", "lora-r8-2", "lora-r8-3"):
        run(*asked, "--adapters", adapter, "--out", str(tmp_path), code=1)
        assert read_report(tmp_path)["summary"]["by_status"]["RESOURCE_EXHAUSTED"] > 100, adapter


def test_faults_count_from_the_end_of_the_warm_up(tmp_path: Path) -> None:
    fault = ["--fault", "slow_worker,at=0,worker=worker-0,factor=3,for=100", "--workers", "1", "--steps"]
    for warmup in ("0", "5"):
        run("--rate", "5", "--duration", "20", *fault, "--warmup", warmup, "--out", str(tmp_path / warmup))
    cold, warm = (read_report(tmp_path / warmup) for warmup in ("0", "5"))
    assert warm["summary"]["tpot_ms"]["p50"] == pytest.approx(cold["summary"]["tpot_ms"]["p50"], rel=0.02)
    assert warm["simulation"]["num_steps"] == len(rows(tmp_path / "5", "steps.csv"))
    assert float(rows(tmp_path / "5", "steps.csv")[0]["start_ps"]) < 5e12
    loss = ["--fault", "worker_loss,at=10,worker=worker-0,for=5", "--warmup", "50"]
    run("--rate", "20", "--duration", "20", *loss, "--steps", "--out", str(tmp_path))
    steps = [row for row in rows(tmp_path, "steps.csv") if row["worker"] == "worker-0"]
    starts = [int(row["start_ps"]) / 1e12 for row in steps]
    assert max(at for at in starts if at < 10) > 9.9
    assert 15 <= min(at for at in starts if at >= 10) < 15.5


def test_a_deadline_passes_without_a_worker_too(tmp_path: Path) -> None:
    faults = [f"--fault=worker_loss,at=3,worker=worker-{n}" for n in range(2)]
    run("--rate", "5", "--duration", "10", "--timeout", "2", *faults, "--out", str(tmp_path), code=1)
    assert set(read_report(tmp_path)["summary"]["by_status"]) == {"OK", "DEADLINE_EXCEEDED"}
    run("-n", "3", "--timeout", "inf", "--out", str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fault", "flood,at=1"], "'flood' is none of worker_loss, slow_worker, freeze_worker"),
        (["--fault", "worker_loss,at=x,worker=worker-0"], "at is 'x'; it must be a number"),
        (["--fault", "slow_worker,worker=worker-0"], "factor is missing"),
        (["--fault", "worker_loss,at=1,worker=worker-9"], "no such worker; there are worker-0, worker-1"),
        (["--fault", "slow_worker,at=1,worker=worker-0,factor=0"], "factor is 0; it must be above 0"),
        (["--fault", "worker_loss,at=1,at=2,worker=worker-0"], "'at=2'"),
        (["--fault", "worker_loss,at=1e7,worker=worker-0"], "a simulation has 4,611,686 s at most"),
        (
            [f"--fault=slow_worker,at={at},worker=worker-0,factor=2,for=5" for at in (1, 4)],
            "at=4.* begins before .*at=1",
        ),
        (["--fault", "adapter_load_failure,at=1,adapter=ghost"], "no such adapter"),
        (["--rate", "1e-8", "-n", "5"], "a simulation has 4,611,686 s at most"),
        (["--steps"], "--steps and --perfetto need --out"),
        (["--adapters", "ghost"], "'ghost' is not in adapters.registry, .*: --set 'adapters.registry="),
        (
            ["--workload", "slora", "--num-adapters", "40", "--adapter-dirs", "a,b"],
            "'a-0' is not in .* count=20}, {id=\"b\"",
        ),
        (["--shards", "3"], "3 schedulers have 2 worker processes"),
        (["--shards", str(10**22)], "10{22} schedulers have 2 worker processes; each needs one: start as many"),
        (["--workers", str(10**22)], "a cluster has at most 100000 workers; ask for fewer"),
        (["--routers", str(10**22)], "10{22} routers are asked for; at most 10000 can be simulated"),
        (["--routers", "3"], "--routers 3 goes with several schedulers only: .* add --shards N, or leave it out"),
        (["--no-report"], "--no-report goes with --out DIR only"),
        (["--workload", "azure", "--rate", "7"], "--rate 7 goes with --workload .* --speed-up F plays them F times"),
        (["--cv", "0"], "--cv is 0; it must be from 1e-06 to 1e"),
        (["--cv", "1e-320"], "--cv is 9.99989e-321; it must be from 1e-06 to 1e"),
        (["--rate", "inf"], "--rate is inf; it must be above 0 and at most 1e"),
        (["--input-range", f"1:{10**22}"], "--input-range goes to 10{22} tokens; at most 2147483647 can be drawn"),
        (["--out", "o" * 300], "--out o{300}: File name too long"),
        (["--record", "r" * 300], "record r{300}: File name too long"),
        (["--serve", "nowhere"], "--serve: HOST:PORT expected, with a port of at most 65535, got 'nowhere'"),
        (["--serve", "[::1]:70000"], "--serve: HOST:PORT expected"),
        (["--sweep", f"rate=1..{10**30}"], "a number has more than 18 digits"),
        (["--sweep", "rate=" + "[" * 50_000], "not an array of values: it is nested too deeply"),
        (["--model", "9" * 5_000], "model '9+'[.]{3} is not known"),
        (["--gpu", "[" * 20_000], r"GPU '\[+'[.]{3} is not known"),
        (["--sweep", "scheduler.policy=" + "9" * 5_000], "--sweep scheduler.policy=9+[.]{3}: .* too many digits"),
        (["--sweep", "scheduler.policy=" + "9" * 5_000 + ",,"], "9'[.]{3} has an empty value"),
        (["--sweep", "rate=" + "9," * 1_000 + "9"], ",[.]{3} has a value twice"),
        (["--sweep", "9" * 5_000], "--sweep 9+[.]{3}: expected KEY=VALUE"),
        (["--sweep", "a" * 5_000 + "=1"], "--sweep a+[.]{3}: no such setting"),
        (["--sweep", "a" * 5_000 + "=1,1"], "--sweep a+[.]{3}: 1,1 has a value twice"),
        (["--set", "scheduler.policy=best"], "scheduler.policy"),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(LorreryError, match=message) as error:
        run(*arguments)
    assert isinstance(error.value, SettingsError)
    assert len(str(error.value)) < 1_000


class CtrlC(Fifo):
    """Admits as ever while somebody presses Ctrl-C."""

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        signal.raise_signal(signal.SIGINT)
        return super().admit(admission, running, at_ps)


@pytest.mark.parametrize(
    ("queue", "raised"),
    [
        ("Exits", r"Exits.admit raised SystemExit\(0\) \(faulty_queues.py, line \d+\)"),
        ("Interrupts", r"Interrupts.admit raised KeyboardInterrupt\(\) \(faulty_queues.py, line \d+\)"),
        ("GeneratorExits", r"GeneratorExits.admit raised GeneratorExit\('gone'\) \(faulty_queues.py, line \d+\)"),
        ("ExitsAtOnce", "ExitsAtOnce: making it raised SystemExit: no such file"),
        ("GeneratorExitsAtOnce", "GeneratorExitsAtOnce: making it raised GeneratorExit: gone"),
    ],
)
def test_a_policy_that_ends_the_process_is_named(queue: str, raised: str) -> None:
    with pytest.raises(LorreryError, match=f"tests.simulator.faulty_queues:{raised}"):
        run("-n", "5", "--rate", "5", "--set", f"scheduler.policy=tests.simulator.faulty_queues:{queue}")


class WritesInTheBatch(Fifo):
    """Changes what runs."""

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        for sequence in running:
            sequence.base_step = 0
        return super().admit(admission, running, at_ps)


def test_a_queue_that_changes_what_runs_gives_no_false_figures_and_is_told(tmp_path: Path) -> None:
    asked = ["-n", "20", "--rate", "30", "--set", f"scheduler.policy={__name__}:WritesInTheBatch"]
    output = run(*asked, "--no-report", "--out", str(tmp_path))
    assert "the queue changed base_step of a running request" in " ".join(output.split())
    run(*asked[:-1], "scheduler.policy=fcfs", "--no-report", "--out", str(tmp_path / "fair"))
    assert [row["output_tokens"] for row in rows(tmp_path)] == [row["output_tokens"] for row in rows(tmp_path / "fair")]


class EmptiesTheBatch(Fifo):
    """Changes the batch itself, which is not looked for."""

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        running._decoding.clear()
        return super().admit(admission, running, at_ps)


def test_an_error_after_which_no_run_can_go_on_names_the_plug_ins() -> None:
    with pytest.raises(AssertionError) as caught:
        run("-n", "20", "--rate", "30", "--set", f"scheduler.policy={__name__}:EmptiesTheBatch")
    (note,) = caught.value.__notes__
    assert note.startswith(f"scheduler.policy = {__name__}:EmptiesTheBatch may have changed what it may only read")


def test_ctrl_c_in_the_midst_of_a_policy_interrupts() -> None:
    assert "interrupted" in run("-n", "5", "--set", f"scheduler.policy={__name__}:CtrlC", code=130)


@pytest.mark.parametrize(("queue", "code"), [("LoopsWhileInterrupted", 130), ("LoopsUntilTerminated", 143)])
def test_a_second_signal_ends_a_policy_that_never_returns(queue: str, code: int) -> None:
    policy = f"scheduler.policy=tests.simulator.faulty_queues:{queue}"
    command = [sys.executable, "-m", "lorrery.cli", "simulate", *CONFIG, "-n", "5", "--set", policy]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (code, "looping\n")  # the echo of the first did not end it


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "README.md: is not a journal"),
        (["--set", "scheduler.policy=fcfs", "--config", "none.toml"], "and those of --set; leave out --config$"),
        (["-n", "5"], "leave out --num-requests$"),
        (["--sweep", "rate=1,2"], "leave out --sweep$"),
        (["--jobs", "2"], "leave out --jobs$"),
    ],
)
def test_a_journal_has_its_own_settings_and_workload(arguments: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        app(["--journal", "README.md", *arguments], standalone_mode=False)


def test_a_journal_is_replayed_or_played_under_what_is_changed(tmp_path: Path) -> None:
    journal = str(run_journal("mixed", 0, tmp_path))
    replayed = run("--journal", journal, "--gpu", "A10G", "--out", str(tmp_path / "same"), config=())
    assert "equal: every batch" in replayed
    assert {path.name for path in (tmp_path / "same").iterdir()} >= {"paired.csv", "differences.csv", "summary.json"}
    out = tmp_path / "other"
    played = run("--journal", journal, "--gpu", "H100-SXM", "--workers", "1", "--out", str(out), "--steps", config=())
    assert "1 x H100-SXM" in played
    assert "difference: simulated less recorded" in played
    names = {path.name for path in out.iterdir()}
    assert names >= {"paired.csv", "differences.csv", "recorded", "report.html", "steps.csv"}
    with pytest.raises(SettingsError, match="nothing is changed"):
        run("--journal", journal, "--steps", "--out", str(out), config=())


@pytest.mark.parametrize("given", ["autoscaler.target=2", " autoscaler.window_seconds = 20", "autoscaler={target=2}"])
def test_the_rule_of_an_autoscaler_that_there_is_not_is_refused(given: str) -> None:
    with pytest.raises(SettingsError, match=r"--set autoscaler\S* needs an autoscaler: add --autoscale"):
        run("-n", "5", "--rate", "5", "--set", given)
    run("-n", "5", "--rate", "5", "--set", given, "--autoscale")
    run("-n", "5", "--rate", "5", "--set", "autoscaler.enabled=false")
