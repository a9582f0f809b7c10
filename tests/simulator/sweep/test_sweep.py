"""`lorrery simulate --sweep`: what is run, kept, told and refused."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lorrery.cli.simulate import app
from lorrery.service.errors import LorreryError, SettingsError
from lorrery.simulator.sweep.axes import parse_axes
from lorrery.simulator.sweep.claims import PointStore
from lorrery.simulator.sweep.outcome import FIGURES, SCALING, Outcome
from lorrery.simulator.sweep.points import Point
from lorrery.view.reports.sweep import close_calls, read_sweep
from lorrery.vocabulary.files import CPU_SECONDS
from lorrery.vocabulary.intervals import mean_and_margin
from tests.simulator.sweep.sweeping import simulate, sweep, table, without_cpu

EXITS, INTERRUPTS = "tests.simulator.faulty_queues:Exits", "tests.simulator.faulty_queues:Interrupts"
DEADLY, BROKEN = "tests.simulator.faulty_queues:Deadly", "tests.simulator.faulty_queues:Broken"


# ---- what is swept ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "texts", "values"),
    [
        ("rate=1,2,4", ("1", "2", "4"), (1, 2, 4)),
        ("rate=0.5, 1", ("0.5", "1"), (0.5, 1.0)),
        ("workers=1..4", ("1", "2", "3", "4"), (1, 2, 3, 4)),
        ("workers=1,2..8..3,16", ("1", "2", "5", "8", "16"), (1, 2, 5, 8, 16)),
        ("scheduler.policy=fcfs,peft", ("fcfs", "peft"), ("fcfs", "peft")),
        ("concurrency=none,8", ("none", "8"), ("none", "8")),
        ('adapters=["all", "a,b-{0..3}"]', ("all", "a,b-{0..3}"), ("all", "a,b-{0..3}")),
        ("adapters.registry=[[], 1.5, true]", ("[]", "1.5", "true"), ("[]", "1.5", "true")),
        ("seed=nan,1", ("nan", "1"), ("nan", "1")),
    ],
)
def test_values_are_listed_ranged_or_an_array(text: str, texts: tuple[str, ...], values: tuple[object, ...]) -> None:
    (axis,) = parse_axes([text])
    assert axis.key == text.partition("=")[0]
    assert axis.texts == texts
    assert axis.values == values
    assert [type(value) for value in axis.values] == [type(value) for value in values]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["rate"], "--sweep rate: expected KEY=VALUE"),
        (["rate="], "--sweep rate=: expected KEY=VALUE"),
        (["rate=1,,2"], "--sweep rate: '1,,2' has an empty value"),
        (["rate=1,1"], "--sweep rate: 1,1 has a value twice"),
        (["rate=1e0,1.0,1"], "--sweep rate: 1e0,1.0,1 has a value twice"),
        (["seed=1,01"], "--sweep seed: 1,01 has a value twice"),
        (["rate=1", "rate=2"], "--sweep rate: given twice"),
        (["input-range=8", "input_range=9"], "--sweep input_range: given twice; list all its values in one"),
        (["workers=3..1"], r"--sweep workers: 3..1 runs backwards; write 1..3, or list the values"),
        (["routers=1,2"], "--sweep routers=2: --routers 2 goes with several schedulers only: .* add --shards N"),
        (["think=0,5"], "--sweep think=0: --think 0 goes with --workload chat, sharegpt only"),
        (["concurrency=4", "rate=1,4"], "--sweep .* needs times, and a closed loop"),
        (["autoscaler.target=1,4"], "--sweep autoscaler.target needs an autoscaler: add --autoscale"),
        (["adapter-exponent=0,2"], "--sweep adapter-exponent=0: --adapter-exponent 0 needs adapters"),
        (["workers=1..3..0"], r"--sweep workers: 1..3..0: expected LOW..HIGH"),
        (["seed=1..999999"], "--sweep seed: 1..999999: 999,999 values"),
        (["seed=1..999", "rate=1..999"], "--sweep cv, seed, rate: 1,996,002 points; 100,000 is the most"),
        (["seed=[1,"], r"--sweep seed: '\[1,': not an array"),
        (
            ["num-adapters=8,200"],
            "--sweep num-adapters=200: .* lists only 32; .*: --set 'adapters.registry=.*count=200",
        ),
        (["adapters=all,x"], "--sweep adapters=x: adapter 'x' is not in adapters.registry"),
        (["ratte=1"], "--sweep ratte: no such setting, nor an option of a workload or a simulation$"),
        (["out=a,b"], "--sweep out: no such setting, nor an option of a workload or a simulation$"),
        (["gpu=L4,L40S"], r"--sweep gpu: no such setting, nor an option .*; did you mean worker.gpu\?$"),
        (["tp=1,2"], r"--sweep tp: no such setting, .*; did you mean worker.tensor_parallel\?$"),
        (["--kv-dtype=fp8"], r"--sweep --kv-dtype: no such setting, .*; did you mean worker.kv_dtype\?$"),
        (["policy=fcfs"], r"--sweep policy: no such setting, .*; did you mean scheduler.policy\?$"),
        (["scheduler.polizy=a"], "--sweep scheduler.polizy=a: scheduler.polizy: no such setting"),
        (["rate=1,fast"], "--sweep rate=fast: .*number"),
        (["rate=1,-1"], "--sweep rate=-1: --rate is -1; it must be above 0"),
        (["num-requests=0"], "--sweep num-requests=0: .*greater than or equal to 1"),
        (["workload=poisson,poison"], "--sweep workload=poison: .*expected one of slora"),
        (["input-range=8:a"], "--sweep input-range=8:a: range '8:a'"),
        (["fault=flood,at=1"], "--sweep fault=flood: .*none of worker_loss"),
        (["scheduler.policy=req_queue,lifo"], "--sweep scheduler.policy=lifo: .*'lifo' is none of"),
        (["scheduler.max_num_seqs=0"], "--sweep scheduler.max_num_seqs=0: scheduler.max_num_seqs: .* got 0$"),
        (["worker.gpu=A10G,H1000"], "--sweep worker.gpu=H1000: .*'H1000' is not known"),
    ],
)
def test_what_cannot_be_is_refused_by_name_before_anything_runs(
    values: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=message):
        sweep(tmp_path / "out", "cv=1,2", *values)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sweep", "rate=1,2", "--steps"], "--steps, --perfetto, --record and --metrics are for a single run"),
        (["--sweep", "rate=1,2", "--serve", "127.0.0.1:0"], "--serve is for a single run; leave out --sweep"),
        (["--jobs", "2"], "are for sweeps; add --sweep"),
        (["--sweep", "cv=1,2", "--cv", "1"], "^--cv and --sweep cv both say what cv is; give one$"),
        (
            ["--sweep", "concurrency=none,2", "-c", "4"],
            "--concurrency and --sweep concurrency both say what concurrency is; give one",
        ),
        (["--sweep", "config=b,c", "--config", "a"], "--config and --sweep config both say what config is; give one"),
        (
            ["--sweep", "scheduler.policy=fcfs,vtc_fair", "--set", "scheduler.policy=peft"],
            "^--set scheduler.policy=peft and --sweep scheduler.policy both say what scheduler.policy is; give one$",
        ),
        (["--sweep", "worker.gpu=L4,L40S", "--gpu", "T4"], "--set worker.gpu=T4 and --sweep worker.gpu both say what"),
        (["--sweep", "rate=1,2", "--backend", "slurm"], "--backend slurm: expected one of processes, dask, ray"),
        (["--sweep", "rate=1,2", "--backend-address", "tcp://h:1"], "processes are of this machine; name --backend"),
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        simulate(*arguments)


# ---- what comes of it ---------------------------------------------------------------------------------------------


def test_the_table_has_each_with_each_in_order_and_each_is_as_a_run_of_its_own(tmp_path: Path) -> None:
    keys = ("scheduler.policy", "rate", "input_range")
    output = sweep(tmp_path, "scheduler.policy=req_queue,vtc_fair", "rate=4,16", "input_range=8:64,512")
    rows = table(tmp_path)
    assert [tuple(row[key] for key in keys) for row in rows] == [
        (policy, rate, lengths)
        for policy in ("req_queue", "vtc_fair")
        for rate in ("4", "16")
        for lengths in ("8:64", "512")
    ]
    assert {row["status"] for row in rows} == {"ok"}
    assert tuple(rows[0]) == (*keys, "status", "error", *(name for name in FIGURES if name not in SCALING), "points")
    assert output.count("vtc_fair") == 4
    simulate("--set", "scheduler.policy=vtc_fair", "--rate", "16", "--input-range", "8:64", "--out", tmp_path / "one")
    report = json.loads((tmp_path / "one" / "summary.json").read_text(encoding="utf-8"))
    summary, row = report["summary"], rows[6]
    for name in ("num_requests", "output_tokens", "duration_seconds", "output_tokens_per_second", "cached_tokens"):
        assert float(row[name]) == summary[name]
    for name, values in (
        ("ttft_ms", summary["from_intended"]["ttft_ms"]),
        ("e2e_ms", summary["from_intended"]["e2e_ms"]),
        ("tpot_ms", summary["tpot_ms"]),
        ("itl_ms", summary["itl_ms"]),
    ):
        for part in ("mean", "p50", "p90", "p99"):
            assert float(row[f"{name}_{part}"]) == values[part]
    for name in ("num_steps", "num_plans", "simulated_seconds"):
        assert float(row[name]) == report["simulation"][name]


def test_a_key_that_changes_nothing_is_told(tmp_path: Path) -> None:
    said = sweep(tmp_path, "scheduler.max_num_seqs=4,8", "rate=4,8")
    told = "scheduler.max_num_seqs made no difference: all figures are the same at each of its values"
    assert told in said
    assert "rate made no difference" not in said
    assert told in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "made no difference" not in sweep(tmp_path, "scheduler.max_num_seqs=4", "rate=4,8")


def test_what_a_run_warns_of_a_sweep_tells_of_its_points_each_time(tmp_path: Path) -> None:
    asked = ["--fault", "worker_loss,at=900,worker=worker-0"]
    said = sweep(tmp_path, "rate=4,8", asked=asked)
    assert "! 2 of 2 points, such as rate=4: " in said
    assert "worker_loss,at=900" in said
    assert "! 2 of 2 points, such as rate=4: " in sweep(tmp_path, "rate=4,8", asked=asked)


def test_a_page_has_the_warnings_of_its_own_points(tmp_path: Path) -> None:
    asked = ["--fault", "worker_loss,at=900,worker=worker-0"]
    sweep(tmp_path, "rate=4,8", asked=asked)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "2 of 2 points, such as rate=4: " in page
    assert "worker_loss,at=900" in page
    sweep(tmp_path, "rate=4,8")
    assert "such as rate=4" not in (tmp_path / "report.html").read_text(encoding="utf-8")
    (tmp_path / "sweep.csv").unlink()
    (told,) = [text for text in read_sweep(tmp_path, "it").warnings if "such as" in text]
    assert told.startswith("2 of 4 points, such as rate=")


def test_a_page_tells_of_the_sweep_that_it_shows_and_not_of_others_in_the_folder(tmp_path: Path) -> None:
    for gpu in ("A10G", "H100-SXM", "L4", "A10G"):
        sweep(tmp_path, "rate=4,8", asked=["--set", f"worker.gpu={gpu}"])
        found = read_sweep(tmp_path, "it").context["settings"]["worker"]["gpu"]
        assert found == gpu


def test_a_page_has_what_all_points_were_given_and_leaves_out_what_is_not_used(tmp_path: Path) -> None:
    given = "--set scheduler.strict=false --set scheduler.policy=fcfs --gpu L40S --workload azure --timeout 9"
    result = CliRunner().invoke(app, [*given.split(), "-n5", "--sweep=speed-up=1,2", f"--out={tmp_path}"])
    assert result.exit_code == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<dd>--set scheduler.strict=false --set scheduler.policy=fcfs --gpu L40S --workload azure " in page
    assert "--num-requests 5 --timeout 9</dd>" in page
    assert "<dt>rate</dt>" not in page
    assert "failed" not in page
    sweep(
        tmp_path / "poisson",
        "rate=4,8",
        asked=["--fault", "worker_loss,at=1,worker=worker-0", "--timeout", 2],
        plots=True,
    )
    page = (tmp_path / "poisson" / "report.html").read_text(encoding="utf-8")
    assert "Failed requests" in page


def test_an_autoscaled_sweep_has_what_the_rule_costs_and_gets(tmp_path: Path) -> None:
    asked = ("--autoscale", "--rate", "20", "--duration", "40", "--set", "autoscaler.sync_period_seconds=5")
    shown = sweep(tmp_path / "out", "autoscaler.target=1,400", asked=asked)
    assert "GPU hours" in shown
    eager, lazy = table(tmp_path / "out")
    simulate(*asked, "--set", "autoscaler.target=1", "--out", tmp_path / "one")
    alone = json.loads((tmp_path / "one" / "summary.json").read_text())["scaling"]
    for name in SCALING:
        assert float(eager[name]) == alone[name]
    assert float(eager["gpu_hours"]) > float(lazy["gpu_hours"])
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Within the service level" in page
    assert "GPU hours" in page
    sweep(tmp_path / "plain", "rate=4,8")
    assert not set(SCALING) & set(table(tmp_path / "plain")[0])


def test_faults_settings_files_and_unset_options_can_be_swept(tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text('model = "Llama-2-7B"\n[worker]\ngpu = "A10G"\n', encoding="utf-8")
    sweep(
        tmp_path / "out",
        f"config=deploy/cluster.toml,{other}",
        'fault=["none", "worker_loss,at=1,worker=worker-0,for=2"]',
        "num-requests=none,5",
    )
    rows = table(tmp_path / "out")
    assert [row["num_requests"] for row in rows] == [rows[0]["num_requests"], "5"] * 4
    assert [int(row["num_requeues"]) > 0 for row in rows[::2]] == [False, True, False, True]
    assert float(rows[4]["tpot_ms_p50"]) > 2 * float(rows[0]["tpot_ms_p50"])


def test_parquet_has_what_csv_has_with_types(tmp_path: Path) -> None:
    from pyarrow import parquet

    sweep(tmp_path, "worker.gpu=H100-SXM,T4", "rate=2.5,8", "seed=1", exit_code=1)
    columns = parquet.read_table(tmp_path / "sweep.parquet")
    types = {name: str(kind) for name, kind in zip(columns.schema.names, columns.schema.types, strict=True)}
    assert (types["worker.gpu"], types["rate"], types["seed"]) == ("string", "double", "int64")
    assert (types["num_requests"], types["ttft_ms_p50"], types["error"]) == ("int64", "double", "string")
    rows, found = table(tmp_path), columns.to_pylist()
    assert [row["status"] for row in rows] == ["ok", "ok", "failed", "failed"]
    assert [{name: "" if value is None else str(value) for name, value in row.items()} for row in found] == rows


def test_one_process_and_two_make_the_same_table(tmp_path: Path) -> None:
    values = ("rate=4,8", "seed=1,2")
    sweep(tmp_path / "one", *values, jobs=1)
    output = sweep(tmp_path / "two", *values, jobs=2)
    assert "4 points to run on 2 processes" in output
    assert without_cpu(tmp_path / "one") == without_cpu(tmp_path / "two")


# ---- what goes wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_point_that_fails_is_told_and_stops_nothing(jobs: int, tmp_path: Path) -> None:
    values = (f"scheduler.policy={DEADLY},req_queue,{BROKEN},fcfs", "scheduler.strict=true,false")
    output = sweep(tmp_path, *values, exit_code=1, jobs=jobs)
    rows = table(tmp_path)
    # fcfs has no original whose quirks could be kept.
    assert [row["status"] for row in rows] == ["failed"] * 2 + ["ok"] * 2 + ["failed"] * 2 + ["failed", "ok"]
    assert rows[0]["error"] == "its process was killed by SIGKILL; was memory short?"
    assert "ZeroDivisionError: no such luck (faulty_queues.py, line" in rows[4]["error"]
    assert "fcfs has no original" in rows[6]["error"]
    assert rows[6]["num_requests"] == ""
    told = "".join(output.splitlines())
    assert told.count("its process was killed by SIGKILL") == 2
    assert "5 of 8 points failed" in output
    again = sweep(tmp_path, *values, exit_code=1, jobs=jobs)
    assert "3 of 8 points are there already" in again
    assert "4 points to run" in again  # the combination that cannot be is none of them
    assert without_cpu(tmp_path) == [{name: row[name] for name in row if name != CPU_SECONDS} for row in rows]


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_fails_whatever_is_swept_ends_a_sweep_at_once(jobs: int, tmp_path: Path) -> None:
    broken = ("--set", f"scheduler.policy={BROKEN}")
    for asked in (broken, broken):  # a failure is not kept: the same command tries again
        output = sweep(tmp_path, "rate=2..13", "cv=1,2", "seed=5", asked=asked, exit_code=1, jobs=jobs)
        statuses = [row["status"] for row in table(tmp_path)]
        assert statuses[0] == statuses[-1] == "failed"
        assert statuses.count("not run") >= 24 - 2 - jobs
        assert "the other points do not run" in output


def test_a_failure_of_one_value_ends_no_sweep(tmp_path: Path) -> None:
    sweep(tmp_path, f"scheduler.policy={BROKEN},fcfs,{DEADLY}", "rate=2,4", exit_code=1)
    assert [row["status"] for row in table(tmp_path)] == ["failed"] * 2 + ["ok"] * 2 + ["failed"] * 2


def test_a_policy_that_ends_its_process_fails_its_point(tmp_path: Path) -> None:
    sweep(tmp_path, f"scheduler.policy={EXITS},{INTERRUPTS},fcfs", exit_code=1)
    rows = table(tmp_path)
    assert [row["status"] for row in rows] == ["failed", "failed", "ok"]
    assert f"{EXITS}.admit raised SystemExit(0)" in rows[0]["error"]
    assert f"{INTERRUPTS}.admit raised KeyboardInterrupt()" in rows[1]["error"]


def test_what_is_done_is_not_run_again(tmp_path: Path) -> None:
    sweep(tmp_path, "rate=4,8,16")
    first, files = table(tmp_path), sorted((tmp_path / "points").iterdir())
    before = {path: path.stat().st_mtime_ns for path in files}
    assert "to run" not in sweep(tmp_path, "rate=4,8,16")
    assert table(tmp_path) == first
    files[0].unlink()
    files[1].write_text('{"kind": "lorrery swe', encoding="utf-8")  # as no version of ours leaves it
    output = sweep(tmp_path, "rate=4,8,16,32")
    assert "1 of 4 points are there already" in output
    assert "3 points to run on 1 process" in output
    assert files[2].stat().st_mtime_ns == before[files[2]]
    assert without_cpu(tmp_path)[:3] == [{name: row[name] for name in row if name != CPU_SECONDS} for row in first]


def test_an_interrupt_keeps_what_is_done_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = PointStore.write

    def write_and_interrupt(store: PointStore, point: Point, outcome: Outcome) -> None:
        write(store, point, outcome)
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(PointStore, "write", write_and_interrupt)
        output = sweep(tmp_path, "rate=4,8,16,32,64", exit_code=130, jobs=2)
    assert "interrupted: 4 points did not run; the same command goes on from here" in output
    assert sorted(row["status"] for row in table(tmp_path)) == ["not run"] * 4 + ["ok"]
    assert "1 of 5 points are there already" in sweep(tmp_path, "rate=4,8,16,32,64")
    assert {row["status"] for row in table(tmp_path)} == {"ok"}


# ---- what it draws, and does without -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "names", "exit_code"),
    [
        (["rate=1,4,16,64", "seed=1,2"], {"sweep.png"}, 0),
        (["worker.gpu=H100-SXM,A10G,T4"], {"sweep.png"}, 1),  # which a T4 cannot hold
        (["worker.gpu=H100-SXM,A10G", "rate=2,4", "cv=1,2"], {"sweep-cv=1.png", "sweep-cv=2.png"}, 0),
        (["rate=4"], set(), 0),
    ],
)
def test_plots_are_made_of_what_was_swept(values: list[str], names: set[str], exit_code: int, tmp_path: Path) -> None:
    sweep(tmp_path, *values, exit_code=exit_code, plots=True)
    plots = set(tmp_path.glob("*.png"))
    assert {path.name for path in plots} == names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in plots)
    assert {path.stem for path in tmp_path.glob("*.svg")} == {path.stem for path in plots}


def test_a_plot_says_units_cluster_and_load_and_is_the_same_each_time(tmp_path: Path) -> None:
    values = ("rate=4,8", "scheduler.policy=req_queue,vtc_fair", "seed=1,2")
    sweep(tmp_path, *values, plots=True)
    drawn = (tmp_path / "sweep.svg").read_bytes()
    text = re.findall(r"<text[^>]*>([^<]*)</text>", drawn.decode())
    assert {"rate (requests/s)", "throughput (tokens/s)", "TTFT (ms)"} <= set(text)
    assert {"req_queue", "vtc_fair", "p50", "p99"} <= set(text)
    assert "Simulated: Llama-3-8B, 1 worker of 1 x H100-SXM" in text
    assert "poisson arrivals, 2 s, prompts of 8 to 512 tokens, answers of 8 to 512 tokens" in text
    assert "means of 2 seeds, with bars for their 95 % intervals" in text
    sweep(tmp_path, *values, plots=True)
    assert (tmp_path / "sweep.svg").read_bytes() == drawn


def test_without_matplotlib_and_pyarrow_it_says_so_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.figure", "pyarrow"):
        monkeypatch.setitem(sys.modules, name, None)
    output = sweep(tmp_path, "rate=4,8", plots=True)
    assert "sweep.parquet needs the extra parquet: pip install 'lorrery[parquet]'" in output
    assert "a plot needs the extra plot: pip install 'lorrery[plot]'" in output
    assert {path.name for path in tmp_path.iterdir()} == {"points", "report.html", "sweep.csv"}


def test_without_a_folder_the_table_is_shown_and_nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    output = simulate("--sweep", "rate=4..6", "--jobs", "1")
    assert "tokens/s" in output
    assert "report" not in output
    assert not list(tmp_path.iterdir())


def test_a_point_is_what_it_is_alone_though_its_queue_keeps_state_in_its_class(tmp_path: Path) -> None:
    asked = ["--set", "scheduler.policy=tests.simulator.faulty_queues:Remembers"]
    rates = {"3": "rate=3", "4": "rate=4", "5": "rate=5"}
    for name, values, jobs in (("one", "rate=3,4,5", 1), ("two", "rate=5,4,3", 2)):
        sweep(tmp_path / name, values, asked=asked, jobs=jobs)
    for rate, value in rates.items():
        sweep(tmp_path / rate, value, asked=asked)
    alone = {rate: without_cpu(tmp_path / rate)[0] for rate in rates}
    for name in ("one", "two"):
        assert {row["rate"]: row for row in without_cpu(tmp_path / name)} == alone


# ---- a cluster of others -------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_a_dask_cluster_makes_the_same_table_and_survives_a_worker_that_dies(tmp_path: Path) -> None:
    import dask
    from distributed import LocalCluster

    values = (f"scheduler.policy=req_queue,{DEADLY}", "rate=4,8")
    sweep(tmp_path / "here", *values, exit_code=1)
    with (
        # Saturation 1: a worker gets its next point once the scheduler has the last one's result, which else could die
        # with a worker that has begun with a deadly point meanwhile.
        dask.config.set({"distributed.scheduler.allowed-failures": 0, "distributed.scheduler.worker-saturation": 1.0}),
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None, silence_logs="CRITICAL") as cluster,
    ):
        where = ("--backend", "dask", "--backend-address", cluster.scheduler_address)
        output = sweep(tmp_path / "there", *values, asked=where, exit_code=1, jobs=4)
    assert f"4 points to run on 1 core of the Dask cluster at {cluster.scheduler_address}" in output
    here, there = without_cpu(tmp_path / "here"), without_cpu(tmp_path / "there")
    assert there[:2] == here[:2]
    assert [row["status"] for row in there] == ["ok", "ok", "failed", "failed"]
    assert all(row["error"].startswith("its Dask worker was lost: Attempted to run task") for row in there[2:])


def test_a_cluster_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorrery.simulator.sweep.backends._CONNECT_SECONDS", 0.2)
    with pytest.raises(LorreryError, match=r"--backend dask: no scheduler at tcp://127\.0\.0\.1:1"):
        simulate("--sweep", "rate=4,8", "--backend", "dask", "--backend-address", "tcp://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LorreryError, match=r"--backend ray needs the extra ray: pip install 'lorrery\[ray\]'"):
        simulate("--sweep", "rate=4,8", "--backend", "ray")


# ---- several seeds ------------------------------------------------------------------------------------------------


def test_a_row_is_the_mean_over_seeds_with_half_of_its_interval(tmp_path: Path) -> None:
    shown = sweep(tmp_path / "means", "rate=4,16", seeds=3)
    sweep(tmp_path / "each", "rate=4,16", "seed=42..44")
    means, each = table(tmp_path / "means"), table(tmp_path / "each")
    assert [row["rate"] for row in means] == ["4", "16"]
    assert {row["num_seeds"] for row in means} == {"3"}
    for place, row in enumerate(means):
        values = [float(one["ttft_ms_p99"]) for one in each[3 * place : 3 * place + 3]]
        mean, margin = mean_and_margin(values)
        assert float(row["ttft_ms_p99"]) == mean
        assert float(row["ttft_ms_p99_ci95"]) == margin
        assert f"{mean:,.1f} ±{margin:,.1f}" in shown
        assert row["points"].split() == [one["points"] for one in each[3 * place : 3 * place + 3]]
    page = (tmp_path / "means" / "report.html").read_text(encoding="utf-8")
    assert "means over 3 seeds ± half of their 95 % interval" in page


def test_drawn_requests_have_three_seeds_unasked_and_recorded_ones_one(tmp_path: Path) -> None:
    simulate("--sweep", "workload=poisson,constant", "--sweep", "rate=4,8", "--out", tmp_path / "drawn")
    assert len(list((tmp_path / "drawn" / "points").glob("*.json"))) == 12
    fixed = ("--workload", "constant", "--input", "8", "--output", "8")
    simulate("--sweep", "rate=4,8", "--out", tmp_path / "fixed", *fixed)
    assert len(list((tmp_path / "fixed" / "points").glob("*.json"))) == 2
    assert "num_seeds" not in table(tmp_path / "fixed")[0]


def test_further_seeds_run_only_what_is_missing(tmp_path: Path) -> None:
    assert "2 points to run" in sweep(tmp_path, "rate=4,8", seeds=1)
    assert "4 points to run" in sweep(tmp_path, "rate=4,8", seeds=3)
    assert "to run" not in sweep(tmp_path, "rate=4,8", seeds=2)


def test_a_row_fails_with_its_first_seed_that_does(tmp_path: Path) -> None:
    sweep(tmp_path, f"scheduler.policy=fcfs,{BROKEN}", seeds=2, exit_code=1)
    assert [row["status"] for row in table(tmp_path)] == ["ok", "failed"]


def test_settings_that_are_not_told_apart_are_named_in_text_and_page(tmp_path: Path) -> None:
    asked = ("--workers", "2", "--adapters", "all")
    said = sweep(tmp_path, "scheduler.placement=least_loaded,power_of_two,round_robin", asked=asked, seeds=3)
    close = [line for line in said.splitlines() if "the best two are not separable" in line]
    assert close
    assert any(line.startswith("! TTFT p99: ") for line in close)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert all(line.removeprefix("! ") in page for line in close)


def test_seeds_are_swept_or_counted(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--seeds 2 and --sweep seed both say which seeds there are; give one"):
        simulate("--sweep", "seed=1..3", "--seeds", "2")
    with pytest.raises(SettingsError, match="--seeds, --jobs, --backend and --backend-address are for sweeps"):
        simulate("--seeds", "2")


def test_only_a_difference_within_chance_is_a_close_call() -> None:
    def told(first: list[float], second: list[float]) -> list[str]:
        values = [{"scheduler.policy": "a", "rate": 2.0}, {"scheduler.policy": "b", "rate": 2.0}]
        return close_calls(values, [[{"ttft_ms_p99": value} for value in own] for own in (first, second)])

    assert told([10.0, 20.0, 30.0], [11.0, 21.1, 30.9]) == []  # in pairs clear, though seeds differ by far more
    (text,) = told([10.0, 20.0, 30.0], [11.0, 19.0, 31.0])
    assert "policy=a and policy=b at rate=2;" in text
    assert told([10.0, 20.0], [10.0, 20.0]) == []
    assert told([10.0], [11.0]) == []
