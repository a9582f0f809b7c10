"""`lorrery plan`: what it says, draws and refuses."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lorrery.cli.app import app as lorrery
from lorrery.cli.plan import app
from lorrery.cli.plan_text import draw_points
from lorrery.service.errors import LorreryError, SettingsError
from lorrery.simulator.plan.plan import Point


def read_report(folder: Path) -> dict[str, Any]:
    """Return a run's summary."""
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def _no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # which pytest-xdist sets


def plan(*arguments: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, [*arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == exit_code, result.output
    return result.output


LLAMA_8B = ["--model", "Llama-3-8B", "--gpu", "H100"]
CLAIM = ["--claim", "3500,1,300"]
SMALL = [*LLAMA_8B, "--prompt", "300", "--output", "60", "--set", "scheduler.running_max_req_size=8"]
"""A replica that takes few and short requests, so that a rate of some requests per second needs several."""


def test_one_deployment_is_shown_over_concurrency():
    output = plan(*LLAMA_8B)
    assert "memory: 0.9 x 80 - 2 - 16.1 weights = 53.9 GB for 411529 KV tokens: 182 streams at once" in output
    assert "TTFT without queueing: 39 ms" in output
    rows = [line.split() for line in output.splitlines() if re.match(r" *\d+ +[\d.]+ +[\d.]+ +[\d.]+ ", line)]
    assert [int(row[0]) for row in rows] == [1, 2, 4, 8, 16, 32, 64, 128, 182]
    assert re.search(r"^ *182 .* 100 +KV space", output, re.MULTILINE)
    assert re.search(
        r"level TTFT p99 1 s, TPOT p99 50 ms, in a closed loop: 182 streams, .* held back by KV space", output
    )


def test_a_ttft_that_knows_no_queue_is_called_so(tmp_path):
    for deployments in (LLAMA_8B, [*LLAMA_8B, "--tp", "1", "--tp", "2"]):
        output = plan(*deployments, "--claim", "3500,1,300", "--json", str(tmp_path / "plan.json"))
        for found in re.finditer("TTFT(?! p99 1 s)", output):
            known = ("TTFT without queueing", "TTFT of 3500 without queueing", "TTFT ms  ITL ms")
            assert output[found.start() :].startswith(known)
    assert "averages" in plan(*LLAMA_8B)


POINTS_AT_80 = """
         TTFT   ITL  TPOT   E2E  tok/s  tok/s          KV
streams    ms    ms    ms     s   each    all  req/s    %  limit
      1    39   8.1   8.1   4.1  122.6    123   0.25    1  memory bandwidth 64%
      2    47   8.2   8.3   4.2  119.6    239   0.48    1  memory bandwidth 64%
"""
POINTS_AT_60 = """
         TTFT   ITL  TPOT  tok/s
streams    ms    ms    ms    all  req/s  limit
      1    39   8.1   8.1    123   0.25  memory bandwidth
                                         64%
"""


def test_a_plan_has_every_column_at_80_and_names_what_60_leave_out():
    def at(width: int) -> str:
        result = CliRunner().invoke(app, LLAMA_8B, env={"COLUMNS": str(width)})
        assert all(len(line) <= width for line in result.output.splitlines())
        return "\n".join(line.rstrip() for line in result.output.splitlines())

    assert POINTS_AT_80 in at(80)
    assert "left out" not in at(80)
    assert POINTS_AT_60 in at(60)
    assert "left out: KV %, E2E s, tok/s each; a terminal of" in at(60)


def test_the_sales_claim_is_answered_in_both_readings():
    output = plan(*LLAMA_8B, "--claim", "3500,1,300")
    assert 'claim "3500 tokens in, first token within 1 s, 300 tokens/s":' in output
    assert re.search(r"first token: true, \d\d ms without queueing", output)
    assert re.search(r"read as one stream's: false, at most 1\d\d tokens/s", output)
    assert re.search(r"read as all streams' together: true from 3 streams on", output)
    assert "first token: false" in plan(*LLAMA_8B, "--claim", "3500,0.01,9")
    assert "true, at most" in plan(*LLAMA_8B, "--claim", "3500,0.01,9")


def test_no_claim_is_judged_that_nobody_gave(tmp_path):
    for deployments in (LLAMA_8B, [*LLAMA_8B, "--tp", "1", "--tp", "2"]):
        assert "claim" not in plan(*deployments, "--json", str(tmp_path / "plan.json"))
    assert json.loads((tmp_path / "plan.json").read_text())["plans"][0]["claim"] is None


def test_a_claim_for_all_streams_is_bound_to_the_most_that_may_run():
    assert "together: true from 3 streams on" in plan(*LLAMA_8B, *CLAIM, "--max-concurrency", "3")
    assert "together: false, at any concurrency that fits" in plan(*LLAMA_8B, *CLAIM, "--max-concurrency", "2")


def test_a_claim_holds_below_its_ttft_and_from_its_rate_on(tmp_path):
    path = tmp_path / "plan.json"

    def answer(claim: str) -> dict[str, float]:
        plan(*LLAMA_8B, "--claim", claim, "--json", str(path))
        return json.loads(path.read_text())["plans"][0]["claim"]

    found = answer("3500,1,300")
    ttft, rate = found["unqueued_ttft"], found["stream_tokens"]
    exact = answer(f"3500,{ttft!r},{rate!r}")
    assert (exact["ttft_holds"], exact["stream_holds"]) == (False, True)
    missed = answer(f"3500,{ttft * (1 + 1e-9)!r},{rate * (1 + 1e-9)!r}")
    assert (missed["ttft_holds"], missed["stream_holds"]) == (True, False)


@pytest.mark.parametrize("text", ["1,nan,1", "1,inf,1", "1,1,nan", "1,1,-1", "0,1,1", "99999999999,1,1"])
def test_a_claim_is_three_numbers_that_can_be(text):
    result = CliRunner().invoke(app, ["--claim", text])
    assert isinstance(result.exception, SettingsError)
    assert "must be more than 0 and at most 2,147,483,647" in str(result.exception)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ttft_p99=inf", "slo ttft_p99 is inf; it must be more than 0, and finite"),
        ("ttft=1", "slo: 'ttft' is not known; known: ttft, tpot, e2e with _mean or a percentile such as _p95"),
        ("ttft_p99", "--slo ttft_p99: expected NAME=VALUE, as in ttft_p95=1"),
        ("goodput=2", "slo goodput is 2; it must be at most 1"),
    ],
)
def test_a_service_level_names_bounds_that_can_be(text: str, message: str):
    with pytest.raises(SettingsError, match=re.escape(message)):
        plan("--slo", text)
    with pytest.raises(SettingsError, match="slo: tpot_mean is given twice"):
        plan("--slo", "tpot_mean=1", "--slo", "tpot_mean=2")


def test_several_deployments_are_compared_and_what_does_not_fit_shows_its_sum():
    output = plan("--model", "Llama-3-8B", "--model", "Llama-3-70B", "--gpu", "H100", "--tp", "1", "--tp", "4")
    assert len(re.findall(r"^Llama-3-\d+B on \d x H100-SXM  ", output, re.MULTILINE)) == 4
    assert "0.9 x 80 GB x 1 - 2 GB x 1 - 141.1 GB of weights = -71.1 GB for the KV cache" in output
    assert all(len(line) <= 124 for line in output.splitlines() if " on " not in line or "  " in line)


def test_a_deployment_that_is_named_twice_is_planned_once(tmp_path):
    made = tmp_path / "plan.json"
    gpus = ["--gpu", "H100", "--gpu", "L40S", "--gpu", "H100-SXM", "--tp", "1", "--tp", "1"]
    plan("--model", "Llama-3-8B", "--model", "meta-llama/Meta-Llama-3-8B", *gpus, "--json", str(made))
    names = [one["deployment"] for one in json.loads(made.read_text(encoding="utf-8"))["plans"]]
    assert names == ["Llama-3-8B on 1 x H100-SXM", "Llama-3-8B on 1 x L40S"]


def test_nothing_that_fits_is_an_error():
    result = CliRunner().invoke(app, ["--model", "Llama-3-70B", "--gpu", "A10G"])
    assert result.exit_code == 1
    assert "does not fit on 1 x A10G" in result.output
    result = CliRunner().invoke(app, ["--tp", "3"])
    assert result.exit_code == 1
    assert "tensor_parallel 3 must divide" in result.output


def test_a_request_larger_than_the_cache_is_told():
    long = ["--set", "scheduler.max_req_input_len=20000", "--set", "scheduler.max_req_total_len=20500"]
    long += ["--set", "scheduler.batch_max_tokens=20500"]
    a10g = ["--model", "Llama-2-7B", "--gpu", "A10G"]
    assert "less than one request's 20500" in plan(*a10g, *long, "--prompt", "20000", exit_code=1)


@pytest.mark.parametrize("rate", [[], ["--rate", "1"]])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "9000"], "prompts of 9000 tokens are refused; scheduler.max_req_input_len is 8192 (--set"),
        (
            ["--prompt", "8000", "--output", "4000"],
            "8000 + 4000 tokens are refused; scheduler.max_req_total_len is 10240",
        ),
        (["--engine", "vllm", "--model", "Llama-2-7B", "--prompt", "8000"], "max_req_input_len is 4095"),
    ],
)
def test_a_request_longer_than_the_cluster_takes_is_refused(arguments, message, rate):
    output = plan(*arguments, *rate, exit_code=1)
    assert message in output
    assert "service level" not in output


def test_a_deployment_that_takes_no_such_requests_is_told_beside_others_that_do():
    output = plan("--engine", "vllm", "--model", "Llama-2-7B", "--model", "Mistral-7B", "--prompt", "6000")
    assert "Llama-2-7B on 1 x H100-SXM: prompts of 6000 tokens are refused" in output
    assert "basis of Mistral-7B" in output


def test_streams_that_wait_for_an_adapters_place_are_simulated():
    """32 streams of 32 adapters with one place were said to get 1,974 tokens/s by arithmetic."""
    asked = ["--engine", "vllm", "--adapters", "32", "--prompt", "500", "--output", "100", "--concurrency", "32"]

    def tokens(*more: str) -> float:
        (row,) = re.findall(r"^ *32 .*", plan(*asked, *more), re.MULTILINE)
        return float(row.split()[6])

    assert tokens() == pytest.approx(320, rel=0.3)
    assert tokens("--set", "adapters.max_loras=32") > 4 * tokens()


def test_concurrency_that_does_not_fit_is_told():
    output = plan(*LLAMA_8B, "--concurrency", "1000000000")
    assert "left out: 1000000000 streams; 182 streams at most, by KV space" in output
    assert "tok/s each" not in output
    output = plan(*LLAMA_8B, "--max-concurrency", "3", "--concurrency", "2,50")
    assert "left out: 50 streams; 3 streams at most, by --max-concurrency" in output


def test_figures_are_written_as_json(tmp_path):
    path = tmp_path / "plan.json"
    plan(*LLAMA_8B, *CLAIM, "--json", str(path))
    (found,) = json.loads(path.read_text())["plans"]
    assert found["points"][0].keys() >= {"itl", "tpot", "e2e", "stream_tokens", "total_tokens", "limit"}
    assert found["claim"]["stream_holds"] is False
    assert found["peak"]["total_tokens"] >= found["within_service_level"]["total_tokens"]
    plan(*SMALL, "--rate", "30", "--requests", "200", "--seeds", "2", "--json", str(path))
    written = json.loads(path.read_text())
    assert written["workload"]["prompt"] == [300, 300]
    search = written["search"]
    assert search["finished"]
    assert search["usd_per_hour"] == pytest.approx(2.69 * search["gpus"])
    assert [[one["seed"] for one in proof["seeds"]] for proof in search["proofs"]] == [[42, 43]] * len(search["proofs"])


def test_the_cluster_file_is_read_as_by_every_command(tmp_path, monkeypatch):
    monkeypatch.delenv("LORRERY_CONFIG", raising=False)
    assert "Llama-3-8B on 1 x H100-SXM" in plan()  # the shipped one
    own, other = tmp_path / "own.toml", tmp_path / "other.toml"
    own.write_text('model = "Llama-2-7B"\n[worker]\ngpu = "A40"\n[scheduler]\nrunning_max_req_size = 3\n')
    other.write_text('model = "Llama-2-13B"\n[worker]\ngpu = "A100"\n')
    monkeypatch.setenv("LORRERY_CONFIG", str(own))
    assert "Llama-2-7B on 1 x A40" in plan()
    assert "Llama-2-13B on 1 x A100-80-SXM" in plan("--config", str(other))
    assert "Llama-2-13B on 1 x H100-SXM" in plan("--config", str(other), "--gpu", "H100")
    assert "Llama-2-7B on 2 x H100-SXM" in plan("--gpu", "H100", "--tp", "2", "--set", "worker.gpu=A100")


def test_each_group_is_planned_whose_processes_have_several_gpus(tmp_path):
    file = tmp_path / "fleet.toml"
    file.write_text(
        'model = "Llama-2-7B"\n[worker]\ngpus = 8\n[[workers]]\ngpu = "A40"\ngpus = 2\n'
        '[[workers]]\ngpu = "H100"\ngpus = 4\n'
    )
    both = plan("--config", str(file))
    assert "A40" in both
    assert "H100" in both
    assert "Llama-2-7B on 1 x L40S" in plan("--config", str(file), "--gpu", "L40S")
    out = tmp_path / "plan.json"
    plan("--config", str(file), "--gpu", "L40S", "--rate", "1", "--requests", "100", "--json", str(out), "-j", "1")
    assert "worker.gpus=1" in json.loads(out.read_text())["search"]["command"]


def test_one_group_is_planned_where_the_settings_name_it():
    groups = ["--set", 'workers=[{gpu = "A40"}, {gpu = "H100"}]', "--set", "worker.group=1"]
    output = plan(*groups)
    assert "on 1 x H100-SXM" in output
    assert "A40" not in output
    assert "on 1 x L40S" in plan(*groups, "--gpu", "L40S")


def test_the_limits_of_the_cluster_file_bound_the_streams(tmp_path):
    at_most_3 = plan(*LLAMA_8B, "--set", "scheduler.running_max_req_size=3")
    assert ": 3 streams, " in at_most_3
    assert "held back by the settings' limit on sequences" in at_most_3
    assert ": 5 streams, " in plan(
        *LLAMA_8B, "--set", "scheduler.running_max_req_size=3", "--max-concurrency", "5", "--concurrency", "1,5"
    )
    pool = plan(*LLAMA_8B, "--set", "scheduler.max_total_token_num=20480")
    assert "411529 KV tokens; scheduler.max_total_token_num is 20480: 9 streams at once" in pool


def test_the_line_of_memory_speaks_of_blocks_and_of_the_limit_on_sequences():
    short = ["--model", "Llama-3-8B", "--gpu", "H100-SXM", "--engine", "vllm", "--prompt", "20", "--output", "4"]
    blocks = plan(*short, "--set", "scheduler.block_size=128")
    assert "in blocks of 128: 3480 streams at once; scheduler.max_num_seqs lets 1024 run" in blocks
    own = plan(*LLAMA_8B, "--set", "scheduler.running_max_req_size=3")
    assert "182 streams at once; scheduler.running_max_req_size lets 3 run" in own


def test_precision_engine_and_adapters_come_from_the_settings(tmp_path):
    exact = plan(*LLAMA_8B)
    small = plan(*LLAMA_8B, "--set", "worker.weight_dtype=fp8", "--set", "worker.kv_dtype=fp8")
    assert exact != small
    assert "9.1 weights" in small
    config = tmp_path / "cluster.toml"
    config.write_text('model = "Llama-3-8B"\n[worker]\ngpu = "H100"\nengine = "vllm-2023"\n')
    assert "Llama-3-8B on 1 x H100-SXM" in plan("--config", str(config))
    adapters = plan(*LLAMA_8B, "--adapters", "40", "--rank", "8,64")
    assert "adapters = " in adapters
    # 104 MiB: 0.3 ms the request, 32 copies of 10 us, and 24 GB/s, after 2 GB/s, as `lorrery simulate` has it.
    assert "delays its first token by 5.2 ms from host memory, 59.7 ms from disk" in " ".join(adapters.split())
    rates = ["--set", "adapters.host_gb_per_second=50", "--set", "adapters.disk_gb_per_second=0.5"]
    faster = " ".join(plan(*LLAMA_8B, "--adapters", "40", "--rank", "8,64", *rates).split())
    assert "by 2.8 ms from host memory, 220.9 ms from disk" in faster
    assert ("adapters.host_gb_per_second is 24" in adapters, "host_gb_per_second" in faster) == (True, False)
    naive = plan(*LLAMA_8B, "--set", "worker.step_time=naive-roofline")
    assert naive != exact
    assert "whole step" in plan(*LLAMA_8B, "--set", "worker.step_time=llm-mock")


def test_a_service_level_nobody_keeps_is_told():
    for bound in ("tpot_p99=0.001", "ttft_mean=0.001", "goodput=1"):
        more = ["--slo", "e2e_p50=0.1"] if bound == "goodput=1" else []
        assert "not even one stream keeps it" in plan(*LLAMA_8B, "--slo", bound, *more)


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_latency_is_plotted_against_throughput(tmp_path, suffix):
    pytest.importorskip("matplotlib", reason="make setup installs it")
    path = tmp_path / f"plan.{suffix}"
    plan(*LLAMA_8B, "--tp", "1", "--tp", "2", "--plot", str(path))
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "X9"], "GPU 'X9' is not known"),
        (["--model", "X9"], "model 'X9' is not known"),
        (["--adapters", "2", "--rank", "8,x"], "--rank 8,x: expected whole numbers"),
        (["--rank", "64"], "--rank 64: goes with --adapters only"),
        (["--requests", "500"], "--requests goes with --rate only"),
        (["--search", "worker.gpu=T4"], "--search goes with --rate only"),
        (["--search", "worker.gpu", "--rate", "1"], "--search worker.gpu: expected KEY=VALUE,VALUE"),
        (
            ["--search", "worker.gp=T4", "--rate", "1", "--tp", "1"],
            "--search worker.gp: no such setting; did you mean worker.gpu?",
        ),
        (["--prompt", "9:3"], "prompt_tokens is (9, 3); the first number must not be above the second"),
        (
            ["--model", "Llama-3-8B", "--model", "Mistral-7B", "--rate", "1"],
            "--rate searches for one model; 2 are named",
        ),
        (["--concurrency", "0"], "--concurrency 0: every number must be at least 1"),
        (["--adapters", "1", "--rank", "99", "--rate", "1"], "has rank 99; max_lora_rank is 64"),
        (["--adapters", "1", "--rank", "99"], "has rank 99; max_lora_rank is 64"),
        (["--rate", "inf"], "rate is inf; it must be more than 0, and finite"),
        (["--rate", "1e20"], "--rate is 1e+20 requests/s; at most"),
        (
            ["--rate", "9e5", "--prompt", "100", "--output", "100"],
            " requests, and 60,000 at most are simulated unasked",
        ),
        (
            ["--rate", "1e5", "--prompt", "100", "--output", "10", "--requests", "1000"],
            "replicas; in a run of 1,000 requests each gets fewer than 20, too few to see a queue",
        ),
        (["--adapters", str(10**22)], f"--adapters is {10**22}; at most 1000000 can be planned for"),
        (["--claim", "3500,1"], "--claim 3500,1: expected TOKENS,SECONDS,TOKENS/S"),
        (["--claim", "0,1,1"], "--claim 0,1,1: every number must be more than 0"),
        (["--json", "/nowhere/plan.json"], "--json /nowhere/plan.json: that is in /nowhere, which is no folder"),
        (["--plot", "/nowhere/plan.svg"], "--plot /nowhere/plan.svg: that is in /nowhere, which is no folder"),
        (["--plot", "plan.gif"], "--plot plan.gif: the name must end in .svg, .png, .pdf"),
        (["--set", "worker.step_time=table"], "step_time = 'table' needs profile"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message):
    with pytest.raises((SettingsError, LorreryError), match=re.escape(message)):
        plan(*arguments)


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_planned():
    result = CliRunner().invoke(app, [*LLAMA_8B, "--json", "/nowhere/plan.json"])
    assert isinstance(result.exception, SettingsError)
    assert result.output == ""


def test_points_that_fall_together_are_marked_once():
    def point(concurrency: int, total: float, e2e: float) -> Point:
        return Point(concurrency, 1, 1, 1, e2e, 1, total, 1, 0.1, "compute", {}, met=True)

    lines = draw_points([point(1, 100, 1), point(2, 101, 1), point(128, 1000, 10)])
    assert any("128" in line for line in lines)
    assert any("+" in line for line in lines[1:-2])
    assert draw_points([point(1, 1, 1)]) == []


def test_the_command_is_listed():
    assert "plan" in CliRunner().invoke(lorrery, ["--help"]).output


def test_own_catalogue_files_are_read(tmp_path: Path):
    own = tmp_path / "own.toml"
    own.write_text(
        'format = 1\n[[gpu]]\nname = "X9"\ntflops = 100\nmemory_gb = 40\ngb_per_second = 900\nnum_sms = 50\n'
    )
    assert "on 1 x X9" in plan("--model", "Llama-3-8B", "--gpu", "x9", "--set", f'catalogue=["{own}"]')
    own.write_text("format = [")
    with pytest.raises(SettingsError, match=r"own\.toml"):
        plan("--set", f'catalogue=["{own}"]')
    with pytest.raises(SettingsError, match=r"none\.toml: No such file"):
        plan("--set", 'catalogue=["none.toml"]')


def test_a_plan_says_what_its_step_times_rest_on(tmp_path: Path):
    path = tmp_path / "plan.json"
    assert "no measurement of L20" in plan("--gpu", "L20", "--json", str(path))
    basis = json.loads(path.read_text())["plans"][0]["basis"]
    assert {one["basis"] for one in basis} == {"assumed"}
    assert {"gemm", "attention"} <= {one["part"] for one in basis}
    assert "no measurement of H100" not in plan("--gpu", "H100-SXM")
    several = " ".join(plan("--gpu", "L20", "--gpu", "H100-SXM").split())
    assert "on 1 x L20: no measurement of L20: gemm, attention, elementwise; assumed: host, memory_gb," in several
    assert "on 1 x H100-SXM: fitted: gemm, attention;" in several


@pytest.mark.parametrize(
    "arguments",
    [
        ["--adapters", "16", "--rank", "16"],
        ["--adapters", "2", "--rank", "8,16"],
        [],
    ],
)
def test_settings_are_checked_with_the_plans_adapters_not_with_those_that_they_replace(arguments: list[str]) -> None:
    assert "KV tokens" in plan("--engine", "vllm", *arguments, "--set", "adapters.max_lora_rank=16")
    with pytest.raises(SettingsError, match="has rank 32; max_lora_rank is 16"):
        plan("--engine", "vllm", "--adapters", "3", "--rank", "32", "--set", "adapters.max_lora_rank=16")
