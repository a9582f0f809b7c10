import asyncio
import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from lorrery.loadgen.command import app

ROOT = pathlib.Path(__file__).parents[2]
TRACE = "deploy/traces/azure_llm_2023_conv_excerpt.csv.gz"


async def start_command(*arguments):
    environment = {**os.environ, "COLUMNS": "100"}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "lorrery.loadgen",
        *arguments,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


async def run_command(*arguments):
    process = await start_command(*arguments)
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_a_trace_plays_to_a_table_and_two_files(start_router, tmp_path):
    router = await start_router()
    code, out, err = await run_command(
        "--target", router.target, "--workload", "azure", "--trace", TRACE, "--speed-up", "100", "-n", "190",
        "--adapters", "all", "--warmup", "2", "--out", str(tmp_path), "--metrics", "127.0.0.1:0",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert "190 requests" in out
    assert "0 failed" in out
    assert "Splitwise" in out
    assert len(router.requests) == 192
    assert {sent.adapter_id for sent in router.requests} == {"lora-0", "lora-1", "lora-2", "lora-3"}
    content = json.loads((tmp_path / "summary.json").read_text())
    assert content["summary"]["num_completed"] == 190
    assert content["kind"] == "lorrery load"
    assert len((tmp_path / "requests.csv").read_text().splitlines()) == 191
    assert "live, at" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("target", "cure"),
    [
        ("http://127.0.0.1:50051", "; try --target 127.0.0.1:50051"),
        ("grpc://router:50051/v1", "; try --target router:50051"),
        ("https://router", ""),
        ("localhost", ""),
        ("127.0.0.1:50051/", ""),
        ("router:0", ""),
        ("router:65536", ""),
        ("", ""),
    ],
)
def test_a_target_that_grpc_cannot_dial_is_refused_at_once_with_the_cure(target: str, cure: str):
    done = CliRunner().invoke(app, ["--target", target, "--connect-timeout", "100"])
    assert done.exit_code == 2
    assert f"--target {target}: HOST:PORT expected, with no scheme and no path{cure}\n" in done.stderr


async def test_failed_requests_make_exit_code_1(start_router):
    router = await start_router()
    code, out, _ = await run_command("--target", router.target, "-n", "5", "-c", "5", "--adapters", "fail:NOT_FOUND")
    assert code == 1
    assert "5 x NOT_FOUND" in out


async def test_what_is_too_long_can_be_left_out(start_router):
    router = await start_router()
    mooncake = "deploy/traces/mooncake_conversation_excerpt.jsonl"
    code, out, err = await run_command(
        "--target", router.target, "--workload", "mooncake", "--trace", mooncake, "-c", "20", "--skip-too-long"
    )
    assert (code, err) == (0, "")
    assert "longer than the cluster's limits" in out
    assert max(len(sent.token_ids.ids) for sent in router.requests) <= 2048


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_the_run_with_a_report_of_what_is_done(start_router, tmp_path, number):
    router = await start_router()
    process = await start_command(
        "--target", router.target, "-n", "5", "--rate", "1000", "--adapters", "held", "--out", str(tmp_path)
    )
    async with router.opened:
        await router.opened.wait_for(lambda: len(router.requests) == 5)
    process.send_signal(number)
    out, err = await process.communicate()
    assert (process.returncode, err.decode()) == (130, "")
    assert "5 open requests were cut off" in out.decode()
    assert json.loads((tmp_path / "summary.json").read_text())["interrupted"] is True


async def test_no_cluster_is_one_line_and_exit_code_1():
    code, _, err = await run_command("--target", "127.0.0.1:1", "--connect-timeout", "0.3")
    assert code == 1
    assert err.splitlines() == ["lorrery load: error: no cluster at 127.0.0.1:1 within 0.3 s: nothing answers there"]


async def test_a_broken_trace_is_one_line_that_names_it(start_router, tmp_path):
    router = await start_router()
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nnonsense\n")
    code, _, err = await run_command("--target", router.target, "--workload", "azure", "--trace", str(trace))
    assert code == 1
    assert len(err.splitlines()) == 1
    assert "trace.csv: line 2" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "nothing"], "expected one of slora, azure"),
        (["--workload", "constant", "--trace", "x"], "does not go with --workload constant; --workload trace plays a"),
        (["--input-range", "a:b"], "expected LOW:HIGH"),
        (["--rate", "0"], "--rate is 0; it must be above 0"),
        (["--speed-up", "nan"], "--speed-up is nan"),
        (["--adapter-dirs", "a"], "goes with --workload slora only"),
        (["--workload", "slora", "--adapter-dirs", "a"], "needs --num-adapters"),
        (["--workload", "slora", "--adapter-exponent", "1"], "slora's skew is --alpha"),
        (["--max-new-tokens", "5"], "needs --no-ignore-eos"),
        (["--jitter", "3"], "--jitter goes with --workload azure, mooncake, trace only"),
        (["--config", "nowhere.toml"], "nowhere.toml"),
        (["--workload", "trace"], "--workload trace needs --trace FILE"),
        (["--out", "pyproject.toml/deeper"], "--out pyproject.toml/deeper: "),
        (["--metrics", "nowhere"], "--metrics: HOST:PORT expected, with a port of at most 65535, got 'nowhere'"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments, message):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("key", ["secret\r\nx-injected: 1", "secret\N{COLLISION SYMBOL}", "secret "])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key):
    result = CliRunner().invoke(app, [], env={"LORRERY_API_KEY": key, "COLUMNS": "200"})
    assert result.exit_code == 2
    assert f"character 7 of {len(key)} is not visible ASCII" in result.output
    assert "secret" not in result.output


def test_help_has_examples_and_formulas():
    result = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "100"})
    assert result.exit_code == 0
    assert "lorrery load --workload azure" in result.stdout
    assert "TPOT = (E2E - TTFT) / (n - 1)" in result.stdout


def test_version_is_printed():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.startswith("lorrery load ")
