"""`lorrery serve`: what its flags amount to, and one engine that runs under them."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import ssl
import tomllib
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from fractions import Fraction
from pathlib import Path

import openai
import pytest
from typer.testing import CliRunner

from lorrery.cli.certs import app as certs_app
from lorrery.cli.serve import app
from lorrery.cli.serve.arguments import arranged, taken
from lorrery.cli.serve.arguments import refused as refused_flags
from lorrery.cli.serve.flags import FLAGS
from lorrery.cli.serve.run import clusters_of
from lorrery.cli.serve.settings import engine_of
from lorrery.cli.serve.values import KINDS, refusals
from lorrery.service.errors import LorreryError, SettingsError
from lorrery.service.faults.kinds import REQUEST_KINDS, parse_fault
from lorrery.service.faults.rules import FaultRules
from lorrery.service.local.processes import ForkServer, start_python
from lorrery.service.settings.cluster import Settings, changed
from tests.cluster.harness import alive, services, wait_until
from tests.ports import held_ports

PEERS = Path(__file__).with_name("peer_flags.txt")


def peer_flags() -> list[str]:
    lines = PEERS.read_text(encoding="utf-8").splitlines()
    return sorted({line for line in lines if line.startswith("--")})


def printed(*arguments: str) -> Settings:
    """The settings that flags amount to, through the file that --print-config writes."""
    result = CliRunner().invoke(app, [*arguments, "--print-config"])
    assert result.exit_code == 0, (result.output, result.exception)
    return changed(tomllib.loads(result.stdout))


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments, "--print-config"])
    assert isinstance(result.exception, LorreryError), result.output
    return str(result.exception)


# --- flags to settings ---


def test_issue_s_own_command_line_amounts_to_vllms_way_with_four_adapters_at_once():
    settings = printed(
        *("--model", "meta-llama/Llama-2-7b-hf", "--max-loras", "4", "--max-num-seqs", "128"),
        *("--lora-modules", "a=8", "b=16", "--port", "8123"),
    )
    assert settings.model == "Llama-2-7B"
    assert settings.served_model_names == ("meta-llama/Llama-2-7b-hf",)
    assert list(settings.adapters.expand()) == [("a", 8), ("b", 16)]
    assert (settings.adapters.max_loras, settings.adapters.host_places) == (4, 4)
    scheduler = settings.scheduler
    assert (scheduler.max_num_seqs, scheduler.policy, scheduler.batching) == (128, "fcfs", "vllm")
    assert (scheduler.memory, scheduler.prefix_cache.kind) == ("on_demand", "blocks")
    assert scheduler.max_num_batched_tokens == 8192
    assert settings.router.http == "127.0.0.1:8123"


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        ("--max_num_batched_tokens 4096", "scheduler.max_num_batched_tokens", 4096),
        ("--max-num-batched-tokens 8k", "scheduler.max_num_batched_tokens", 8000),
        ("--no-enable-chunked-prefill", "scheduler.enable_chunked_prefill", False),
        ("--no-enable-chunked-prefill --gpu L4 --max-model-len 4k", "scheduler.max_num_batched_tokens", 4000),
        ("--max-num-batched-tokens 2048 --max-model-len 4k", "scheduler.max_num_batched_tokens", 2048),
        ("--scheduling-policy priority", "scheduler.policy", "priority"),
        ("--no-async-scheduling", "scheduler.async_scheduling", False),
        ("--long-prefill-token-threshold 512", "scheduler.long_prefill_token_threshold", 512),
        ("--long-prefill-token-threshold-adaptive", "scheduler.long_prefill_token_threshold_adaptive", True),
        ("--max-num-seqs 64 --max-num-active-seqs 16", "scheduler.max_num_active_seqs", 16),
        ("--no-scheduler-reserve-full-isl", "scheduler.scheduler_reserve_full_isl", False),
        ("--watermark 0.25", "scheduler.watermark", 0.25),
        ("--enable-prefix-caching=false", "scheduler.prefix_cache.kind", "none"),
        ("--enable-kvcache --block-size 32", "scheduler.block_size", 32),
        ("--max-num-batched-tokens 100", "scheduler.max_num_seqs", 100),
        ("--max-lora-rank 320", "adapters.max_lora_rank", 320),
        ("--block-size 48", "scheduler.block_size", 48),
        ("--block-size 1", "scheduler.block_size", 1),
        ("--max-loras 2 --max-cpu-loras 2", "adapters.max_cpu_loras", 2),
        ("--seed 1", "scheduler.max_req_total_len", 8192),
        ("--gpu L4 --kv-cache-size 64", "scheduler.max_req_total_len", 1024),
        ("--kv-cache-size 1024", "scheduler.max_total_token_num", 16384),
        ("--num-gpu-blocks-override 64 --block-size 64 --max-model-len 4K", "scheduler.max_total_token_num", 4096),
        ("--max-model-len 4K", "scheduler.max_req_total_len", 4096),
        ("--max-model-len 1.5k", "scheduler.max_req_input_len", 1499),
        ("--max-model-len auto", "scheduler.max_req_total_len", 8192),
        ("--num-gpu-blocks-override 65 --block-size 64 --max-model-len 4k", "scheduler.max_total_token_num", 4096),
        ("--num-gpu-blocks-override 40 --max-model-len 512", "scheduler.max_total_token_num", 624),
        ("--max-model-len auto --num-gpu-blocks-override 64", "scheduler.max_req_total_len", 1008),
        ("--max-model-len -1 --model Llama-3-8B", "scheduler.max_req_total_len", 8192),
        ("--kv-cache-memory-bytes 1G", "scheduler.max_total_token_num", 8192),
        ("-pp 1 -n 1 --api-server-count 1", "worker.tensor_parallel", 1),
        ("-tp 2", "worker.tensor_parallel", 2),
        ("--quantization fp8", "worker.weight_dtype", "fp8"),
        ("--moe-backend Marlin --quantization awq", "worker.moe_backend", "marlin"),
        ("--enforce-eager", "worker.enforce_eager", True),
        ("--disable-cuda-graph", "worker.enforce_eager", True),
        ("--no-enforce-eager", "worker.enforce_eager", False),
        ("-q awq", "worker.weight_dtype", "int4"),
        ("--kv-cache-dtype fp8_e4m3", "worker.kv_dtype", "fp8"),
        ("--host 0.0.0.0", "router.http", "0.0.0.0:8000"),
        ("--host ::1 --port 0", "router.http", "[::1]:0"),
        ("--served-model-name big small", "router.served_model_names", ("big", "small")),
        ("--max-waiting-queue-length 7", "scheduler.max_waiting_requests", 7),
        ("--mode echo", "worker.output.mode", "echo"),
        ("--seed 3", "router.seed", 3),
        ("--speedup-ratio 4", "time_scale", 0.25),
        ("--startup-duration 250ms", "worker.startup_seconds", 0.25),
        ("--startup-time 20", "worker.startup_seconds", 20.0),
        ("--time-to-first-token 100 --inter-token-latency 20ms", "worker.constant.prefill_ms", 80.0),
        ("--prefill-time-per-token 0.25 --inter-token-latency 20", "worker.constant.prefill_token_ms", 0.25),
        ("--prefill-overhead 30ms --inter-token-latency 20", "worker.step_time", "constant"),
        ("--zmq-endpoint tcp://*:5557 --use-vllm-map-event-format", "worker.kv_events.format", "map"),
        ("--use-vllm-map-event-format=false", "worker.kv_events.format", "array"),
        ('--kv-events-config {"enable_kv_cache_events":true,"buffer_steps":9}', "worker.kv_events.buffer_steps", 9),
        ('--kv-events-config {"enable_kv_cache_events":true}', "worker.kv_events.endpoint", "tcp://*:5557"),
        (
            '--kv-events-config {"enable_kv_cache_events":true,"publisher":"zmq"}',
            "worker.kv_events.endpoint",
            "tcp://*:5557",
        ),
        ('--kv-events-config {"publisher":"zmq"}', "worker.kv_events.endpoint", None),
        ('--kv-events-config {"enable_kv_cache_events":true,"publisher":"null"}', "worker.kv_events.endpoint", None),
        ("--uvicorn-log-level trace", "log.level", "debug"),
        ("--shutdown-timeout 3", "worker.drain_seconds", 3.0),
        ("--lora-target-modules q_proj down_proj", "adapters.target_modules", "all-linear"),
        ("--max-num-seqs 8 --set scheduler.max_num_seqs=9", "scheduler.max_num_seqs", 9),
        ("--disable-log-requests --trust-remote-code --enable-lora", "scheduler.policy", "fcfs"),
    ],
)
def test_flag_sets_what_docs_say(flags: str, key: str, value: object):
    found: object = printed("Llama-3-8B", *flags.split())
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value


@pytest.mark.parametrize(
    ("arguments", "weight_dtype"),
    [
        ("openai/gpt-oss-120b", "mxfp4"),
        ("openai/gpt-oss-20b --dtype auto", "mxfp4"),
        ("openai/gpt-oss-20b --dtype bfloat16", "mxfp4"),
        ("Qwen/Qwen3-32B-AWQ", "int4"),
        ("Qwen/Qwen3-32B-AWQ --dtype half", "int4"),
        ("Qwen/Qwen3-8B --dtype half", "float16"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507-FP8", "fp8"),
        ("Qwen/Qwen3-32B-FP8 -q nvfp4 --gpu B200", "nvfp4"),
        ("Qwen/Qwen3-8B", "bfloat16"),
    ],
)
def test_weights_have_the_type_of_the_checkpoint(arguments: str, weight_dtype: str):
    assert printed(*arguments.split()).worker.weight_dtype == weight_dtype


def test_gpu_memory_utilization_and_bytes_size_the_kv_pool():
    def pool(*flags: str) -> int:
        found = printed("Llama-3-8B", *flags).scheduler.max_total_token_num
        assert found is not None
        return found

    most, less = pool("--gpu-memory-utilization", "0.9"), pool("--gpu-memory-utilization", "0.5")
    # 0.4 of the 85 GB that an H100 reports, at 131,072 bytes a token; the pool has whole blocks of 16.
    assert abs(most - less - 34 * 10**9 // 131_072) <= 16
    assert pool("--kv-cache-memory-bytes", "1G") == 2**30 // 131_072


def test_adapters_have_the_rank_of_their_folder_and_the_widest_projections(tmp_path: Path):
    folder = tmp_path / "sql"
    folder.mkdir()
    config = {"r": 8, "target_modules": ["q_proj", "up_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    as_json = json.dumps({"name": "b", "path": str(folder), "base_model_name": "Llama-3-8B"})
    several = json.dumps([{"name": "c", "rank": 4}, {"name": "d", "path": str(folder)}])
    settings = printed("Llama-3-8B", "--lora-modules", f"a={folder}", as_json, several)
    assert list(settings.adapters.expand()) == [("a", 8), ("b", 8), ("c", 4), ("d", 8)]
    assert [spec.path for spec in settings.adapters.registry] == [str(folder), str(folder), None, str(folder)]
    assert settings.adapters.target_modules == "all-linear"


@pytest.mark.parametrize(
    ("feature", "why"),
    [
        ({"use_dora": True}, "use_dora = true; vLLM does not support DoRA"),
        ({"rank_pattern": {"v_proj": 32}}, "rank_pattern.v_proj = 32; max_lora_rank is 16"),
    ],
)
def test_an_adapter_that_vllm_refuses_is_refused(tmp_path: Path, feature: dict[str, object], why: str):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 8, **feature}), encoding="utf-8")
    assert f"adapter_config.json has {why}" in refused("Llama-3-8B", "--lora-modules", f"a={tmp_path}")


def test_only_a_regular_file_is_read_for_an_adapter(tmp_path: Path):
    os.mkfifo(tmp_path / "adapter_config.json")
    message = refused("Llama-3-8B", "--lora-modules", f"a={tmp_path}")
    assert message.endswith("is no regular file; give that of an adapter, or give its rank: --lora-modules a=16")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "no model is named"),
        ("Llama-3-8B --model Qwen2.5-7B", "two models are named"),
        ("LLama-3-9B", "model 'LLama-3-9B' is not known (nearest: Llama-3"),
        ("Llama-3-8B --gpu H1000", "GPU 'H1000' is not known (nearest: H100-SXM)"),
        ("Llama-3-70B", "does not fit on 1 x H100-SXM"),
        ('Llama-3-8B --gpu L4 --set workers=[{gpu="L40S"}]', "no worker has it: every group of [[workers]] sets gpu"),
        (
            "Llama-3-8B -tp 2 --set workers=[{tensor_parallel=1}]",
            "--tensor-parallel-size 2: worker.tensor_parallel is 2, and no worker has it",
        ),
        (
            'Llama-3-8B --kv-cache-dtype fp8 --set workers=[{kv_dtype="bfloat16"}]',
            "--kv-cache-dtype fp8: worker.kv_dtype is 'fp8', and no worker has it",
        ),
        (
            'Llama-3-8B --quantization awq --set workers=[{weight_dtype="fp8"}]',
            "--quantization awq: worker.weight_dtype is 'int4', and no worker has it",
        ),
        (
            "Llama-3-8B --inter-token-latency 5 --set workers=[{constant={step_ms=1}}]",
            "--inter-token-latency 5: worker.constant.step_ms is 5.0, and no worker has it",
        ),
        ("Llama-3-8B -pp 2", "--pipeline-parallel-size 2: it must be 1; --tensor-parallel-size splits a model"),
        ("Llama-3-8B --nnodes=2", "--nnodes 2: it must be 1; Lorrery's services run on several machines"),
        ("Llama-3-8B --api-server-count 4", "--api-server-count 4: it must be 1"),
        ("Llama-3-8B --engine-type sglang", "--engine-type sglang: it must be vllm"),
        (
            "Llama-3-8B --max-model-len 1k --long-prefill-token-threshold 1001",
            "--long-prefill-token-threshold 1001: it must be at most --max-model-len, 1000",
        ),
        ("Llama-3-8B --max-num-seqs 8 --max-num-active-seqs 9", "max_num_active_seqs (9) must be at most max_num_seqs"),
        ("Llama-3-8B --max-num-batched-tokens many", "--max-num-batched-tokens many: a number expected"),
        ("Llama-3-8B --no-enable-eplb", "the only modelled forms of parallelism are --tensor-parallel-size"),
        ("Llama-3-8B --max-num-sqes 3", "no such flag; did you mean --max-num-seqs?"),
        ("Llama-3-8B --no-trust-remote-code", "--trust-remote-code cannot be turned off"),
        ("Llama-3-8B --lora-modules a=/nowhere", "nothing is downloaded; give its rank: --lora-modules a=16"),
        ("Llama-3-8B --lora-modules a=64", "--max-lora-rank is 16; raise it"),
        ("Llama-3-8B --lora-modules a", "NAME=RANK or NAME=PATH expected"),
        ('Llama-3-8B --lora-modules {"name":3}', 'an object with "name"'),
        ("Llama-3-8B --lora-modules Llama-3-8B=8", "has the base model's name"),
        ("Llama-3-8B --max-model-len 16k", "Llama-3-8B takes 8192 tokens; give fewer, or set VLLM_ALLOW_LONG_MAX_MO"),
        ("Llama-3.1-8B --gpu L4 --max-model-len 100k", "--max-model-len 100000: the KV cache holds"),
        (
            "Llama-3-8B --max-num-batched-tokens 100 --max-num-seqs 256",
            "--max-num-batched-tokens 100: it must be at least --max-num-seqs, 256",
        ),
        ("Llama-3-8B --max-num-seqs 10000", "--max-num-batched-tokens 8192: it must be at least --max-num-seqs, 10000"),
        ("Llama-3-8B --max-cpu-loras 1 --max-loras 4", "--max-cpu-loras 1: it must be at least --max-loras, 4"),
        ("Llama-3-8B --max-lora-rank 12", "--max-lora-rank 12: it must be one of 1, 8, 16, 32, 64, 128, 256, 320, 512"),
        ("Llama-3-8B --max-lora-rank 1000", "--max-lora-rank 1000: it must be one of"),
        ("Llama-3-8B --block-size 17", "--block-size 17: it must be 1, 8, or a multiple of 16"),
        ('Llama-3-8B --kv-events-config {"publisher":"kafka"}', "publisher is 'kafka'; it must be null or zmq"),
        ("Llama-3-8B --kv-cache-size 9 --gpu-memory-utilization 0.5", "both say how large the KV cache is"),
        ("Llama-3-8B --gpu-memory-utilization 1.5", "it must be above 0 and at most 1"),
        ("Llama-3-8B --speedup-ratio 0", "it must be above 0"),
        ("Llama-3-8B --time-to-first-token 100", "give --inter-token-latency too, above 0"),
        ("Llama-3-8B --inter-token-latency 1 --time-to-first-token 9 --prefill-overhead 3", "give one"),
        ("Llama-3-8B --inter-token-latency fast", "a duration expected, such as 5s or 250ms"),
        ('Llama-3-8B --kv-events-config {"x":1}', "x has no meaning here"),
        ("Llama-3-8B --preemption-mode fifo", "the last to arrive is preempted"),
        ("Llama-3-8B --failure-injection-rate 101", "it is a percentage"),
        ("Llama-3-8B --failure-injection-rate 1 --failure-types flood", "must be one of rate_limit"),
        ("Llama-3-8B --failure-types rate_limit", "--failure-types needs --failure-injection-rate"),
        (
            "Llama-3-8B --ports 8000-8001 --replicas 3",
            "--ports 8000-8001: ports for 2, and --replicas 3; leave one out",
        ),
        ("Llama-3-8B --ports 8000-", "--ports 8000-: ports expected, such as 8000-8002 or 8000,8001,8002"),
        ("Llama-3-8B --ports 8001-8000", "--ports 8001-8000: 8001-8000 must go up, to 65535 at most"),
        ("Llama-3-8B --ports 0,1,65536", "65536 must go up, to 65535 at most"),
        ("Llama-3-8B --ports 0,0,1,1", "a port is there twice; each engine needs its own, or 0"),
        ("Llama-3-8B --replicas 2 --port 8000", "--port 8000: each engine of a fleet has its own; give --ports"),
        ("Llama-3-8B --replicas 2 --grpc-port 9", "--grpc-port 9: each engine of a fleet has its own"),
        ("Llama-3-8B --port 99999", "router.http: HOST:PORT expected"),
        ("Llama-3-8B --set scheduler.polici=x", "scheduler.polici: no such setting"),
    ],
)
def test_what_cannot_be_is_refused_with_a_cure(arguments: str, message: str):
    assert message in refused(*arguments.split())


def test_a_model_may_take_more_than_its_own_tokens_if_the_environment_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert printed("Llama-3-8B", "--max-model-len", "16K").scheduler.max_req_total_len == 16384
    assert "the KV cache holds 445472 tokens" in refused("Llama-3-8B", "--max-model-len", "900k")


@pytest.mark.parametrize(("model", "tokens"), [("Llama-3.1-8B", 131072), ("Llama-2-7B", 4096)])
@pytest.mark.parametrize("flags", [[], ["--no-enable-chunked-prefill"]])
def test_a_request_is_as_long_as_the_model_allows(model: str, tokens: int, flags: list[str]):
    scheduler = printed(model, *flags).scheduler
    assert (scheduler.max_req_total_len, scheduler.max_req_input_len) == (tokens, tokens - 1)


def test_every_flag_of_the_peers_is_taken_or_explained():
    unknown: list[str] = []
    for flag in peer_flags():
        try:
            arranged([flag])
        except SettingsError as error:
            if "is not for this command: " not in str(error):
                unknown.append(flag)
    assert unknown == []
    assert len(peer_flags()) > 400


def test_no_flag_is_in_both_tables_or_twice_in_one():
    named = [part for flag in FLAGS for name in flag.names for part in name.split("/")]
    explained = [flag for _, flags in refused_flags() for flag in flags]
    assert len({*named, *explained, *taken()}) == len(named) + len(explained) + len(taken())


def test_the_beginning_of_a_name_will_do_if_it_is_of_one_flag() -> None:
    assert printed("Llama-3-8B", "--max-num-seq", "8").scheduler.max_num_seqs == 8
    assert printed("Llama-3-8B", "--no-enable-prefix-cach").scheduler.prefix_cache.kind == "none"
    assert "--lora: several flags begin so: --lora-dtype, " in refused("Llama-3-8B", "--lora", "sql")
    assert "; adapters are --lora-modules NAME=RANK or NAME=PATH" in refused("Llama-3-8B", "--lora", "sql")
    assert "--speculative-config is not for this command" in refused("Llama-3-8B", "--speculative-c={}")
    assert "no such flag" in refused("Llama-3-8B", "--frobnicate")


def test_every_beginning_that_is_of_one_flag_of_vllms_is_taken_for_it() -> None:
    own = PEERS.read_text(encoding="utf-8").partition("# llm-d-inference-sim")[0].splitlines()
    flags = sorted(line for line in own if line.startswith("--"))

    def outcome(argument: str) -> tuple[str, ...]:
        try:
            return tuple(arranged([argument]))
        except SettingsError as error:
            return (str(error),)

    wrong = [
        begin
        for flag in flags
        for length in range(len("--x"), len(flag))
        if sum(one.startswith(begin := flag[:length]) for one in flags) == 1
        and begin not in ("--gpu", "--no")  # a flag of our own; the beginning of every switch's negation
        and outcome(begin) != outcome(flag)
    ]
    assert wrong == []


def test_settings_are_checked_together_with_those_of_set() -> None:
    settings = printed("Llama-3-8B", "--lora-modules", "a=64", "--set", "adapters.max_lora_rank=64")
    assert list(settings.adapters.expand()) == [("a", 64)]


@pytest.mark.parametrize(
    ("given", "left", "lines"),
    [
        ("m --load-format auto --port 1", "m --port 1", ["--load-format auto has no effect: there are no weights"]),
        ("--load-format=auto m", "m", ["--load-format auto has no effect"]),
        ("--cudagraph-capture-sizes 1 2 --port 1 m", "--port 1 m", ["--cudagraph-capture-sizes 1 2 has no effect"]),
        ("--enable-log-requests m", "m", ["--enable-log-requests has no effect: logs are Lorrery's own"]),
        ("--no-enable-log-requests m", "m", ["--no-enable-log-requests has no effect"]),
        ("-O3 -cc.mode=3 m", "m", ["--optimization-level 3 has no", "--compilation-config.mode 3 has no effect"]),
        ("--lora-dtype auto m", "m", ["--lora-dtype auto has no effect: adapters have 16-bit weights"]),
        (
            "--trust-remote-code m",
            "--trust-remote-code m",
            ["--trust-remote-code has no effect: No model"],
        ),
        ("--hf-token --port 1 m", "--port 1 m", ["--hf-token has no effect"]),
    ],
)
def test_a_flag_without_effect_is_taken_with_a_line_that_says_so(given: str, left: str, lines: list[str]) -> None:
    noticed: list[str] = []
    assert arranged(given.split(), noticed.append) == left.split()
    assert len(noticed) == len(lines)
    assert all(line.startswith(begin) for line, begin in zip(noticed, lines, strict=True))


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        (["--lora-modules", "a=1", "b=2", "--port", "1"], "--lora-modules a=1 --lora-modules b=2 --port 1"),
        (["m", "--lora_modules=a=1", "b=2"], "m --lora-modules=a=1 --lora-modules b=2"),
        (["--enable-kvcache=true"], "--enable-prefix-caching"),
        (["--no-enable-prefix-caching"], "--no-enable-prefix-caching"),
        (["-dp", "2"], "--data-parallel-size 2"),
        (["--port", "0", "m", "--", "--frob"], "--port 0 m -- --frob"),
    ],
)
def test_arguments_are_put_in_order(given: Sequence[str], arguments: str):
    assert arranged(given) == arguments.split()


def test_ports_of_kv_events_count_up_through_a_fleet(tmp_path: Path):
    config = '{"enable_kv_cache_events":true,"endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}'
    engine = engine_of("Llama-3.1-8B", {"kv_events_config": config, "data_parallel_size": 2}, [])
    with ForkServer() as fork_server:
        clusters = clusters_of(engine, [0, 8001, None], tmp_path, fork_server, lambda _name, _line: None)
        found = [cluster.settings for cluster in clusters]
        with pytest.raises(SettingsError, match="leave at least 102 between them"):
            clusters_of(engine, [0] * 51, tmp_path, fork_server, lambda _name, _line: None)
    assert [one.worker.kv_events.endpoint for one in found] == [f"tcp://*:{port}" for port in (5557, 5559, 5561)]
    assert [one.worker.kv_events.replay_endpoint for one in found] == [f"tcp://*:{port}" for port in (5657, 5659, 5661)]
    assert [one.router.http for one in found] == [f"127.0.0.1:{port}" for port in (0, 8001, 8000)]


@pytest.mark.parametrize("kinds", [[], ["rate_limit"], ["rate_limit", "server_error", "model_not_found"]])
@pytest.mark.parametrize("percent", [5.0, 30.0, 100.0])
def test_failures_are_as_frequent_as_asked_and_each_kind_alike(percent: float, kinds: list[str]):
    faults = [parse_fault(text) for text in refusals(percent, kinds, seed=1)]
    left, shares = Fraction(1), []
    for fault in faults:
        shares.append(left * fault.share)
        left -= shares[-1]
    assert abs(1 - left - Fraction(percent) / 100) < Fraction(1, 10**9)
    assert max(shares) - min(shares) < Fraction(1, 10**9)
    assert {fault.status for fault in faults} == {KINDS[kind] for kind in kinds or KINDS}
    rules = FaultRules(faults, REQUEST_KINDS)
    failed = sum(bool(rules.choose("", "", 0)) for _ in range(2000))
    assert abs(failed / 2000 - percent / 100) < 0.05


# --- one engine ---

KEYS = ("first-key", "second-key")


def health(url: str, tls: ssl.SSLContext) -> int | None:
    """The status of /health; None: nothing listens."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=60, context=tls) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


@pytest.fixture
def port() -> Iterator[int]:
    with held_ports(1) as (port,):
        yield port


@contextlib.asynccontextmanager
async def serving(*arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, asyncio.StreamReader]]:
    """Run the command; yield its process and its output, and kill it if it still runs."""
    process = await start_python(
        ["-m", "lorrery.cli", "serve", *arguments],
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        variables={"LORRERY_SCHEDULER__POLICY": "peft"},  # which must not count
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.cluster
async def test_one_engine_answers_under_its_flags_and_ends_with_a_signal(tmp_path: Path, port: int):
    assert CliRunner().invoke(certs_app, [str(tmp_path)]).exit_code == 0
    tls = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    url = f"https://127.0.0.1:{port}"
    arguments = [
        *("meta-llama/Llama-3.1-8B-Instruct", "--served-model-name", "big", "small", "--seed", "7"),
        *("--lora-modules", "a=8", "b=16", "--max-loras", "2", "--startup-duration", "10s", "-dp", "2"),
        *("--api-key", *KEYS, "--port", str(port), "--max-model-len", "1K"),
        *("--ssl-certfile", str(tmp_path / "cluster.pem"), "--ssl-keyfile", str(tmp_path / "cluster.key")),
    ]
    async with serving(*arguments) as (process, output):
        seen: list[int | None] = []

        def serves() -> bool:
            seen.append(health(url, tls))
            return seen[-1] == 200

        await wait_until(lambda: asyncio.to_thread(serves), 60)
        assert 503 in seen  # the weights took their time
        line = (await output.readline()).decode()
        assert line.startswith(f"ready: {url} serves big, small on 2 x H100-SXM, adapters: 2")

        def client(key: str) -> openai.AsyncOpenAI:
            http = openai.DefaultAsyncHttpxClient(verify=tls)
            return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, http_client=http)

        async with client(KEYS[1]) as known:
            models = {model.id: model for model in (await known.models.list()).data}
            assert list(models) == ["big", "small", "a", "b"]
            assert models["small"].model_dump()["max_model_len"] == 1024
            texts: list[str] = []
            for model in ("big", "small", "a"):
                answer = await known.completions.create(model=model, prompt="hello", max_tokens=5, seed=1)
                assert answer.model == model
                texts.append(answer.choices[0].text)
            assert texts[0] == texts[1] != texts[2]
            with pytest.raises(openai.NotFoundError):
                await known.completions.create(model="Llama-3-8B-of-another", prompt="hello", max_tokens=5)
            drawn = [await known.completions.create(model="big", prompt="x", max_tokens=5) for _ in range(2)]
            assert drawn[0].choices[0].text != drawn[1].choices[0].text
        async with client("no-key") as unknown:
            with pytest.raises(openai.AuthenticationError):
                await unknown.models.list()

        pids = services(process.pid)
        assert sorted(pids.values()) == ["router", "scheduler", "worker", "worker"]
        process.send_signal(signal.SIGTERM)
        rest, errors = await process.communicate()
        assert (process.returncode, rest) == (0, b""), errors
        assert b"LORRERY_SCHEDULER__POLICY does not count here" in errors
        assert not [pid for pid in pids if alive(pid)]


@pytest.mark.cluster
async def test_a_fleet_serves_on_its_ports_until_a_signal_and_an_engine_that_breaks_leaves_the_others(tmp_path: Path):
    file = tmp_path / "fleet.json"
    with held_ports(2) as ports:
        arguments = ["Llama-3.1-8B", "--lora-modules", "a=8", "--announce", str(file)]
        async with serving(*arguments, "--ports", ",".join(map(str, [*ports, 0])), "--replicas", "3") as (
            process,
            output,
        ):
            lines = [(await output.readline()).decode() for _ in range(3)]
            engines = json.loads(file.read_text())["engines"]
            assert [engine["url"] for engine in engines[:2]] == [f"http://127.0.0.1:{port}" for port in ports]
            for line, engine in zip(lines, engines, strict=True):
                assert line.startswith(f"ready: {engine['url']} serves Llama-3.1-8B on 1 x H100-SXM, adapters: 1;")
                assert line.endswith(f" gRPC at {engine['grpc']}\n")
            pids = [pid for engine in engines for pid in engine["pids"].values()]
            assert {*pids} == {*services(process.pid)}

            broken, *others = engines
            os.kill(broken["pids"]["worker-0"], signal.SIGKILL)
            await wait_until(lambda: not [pid for pid in broken["pids"].values() if alive(pid)])
            for engine in others:
                assert await asyncio.to_thread(health, engine["url"], ssl.create_default_context()) == 200
            process.send_signal(signal.SIGINT)
            rest, errors = await process.communicate()
            assert (process.returncode, rest) == (1, b""), errors
            assert b"engine 0: worker-0 ended unexpectedly with signal 9; stopping the rest" in errors
            assert not [pid for pid in pids if alive(pid)]


@pytest.mark.cluster
async def test_a_fleet_of_which_one_cannot_listen_does_not_start(tmp_path: Path):
    file = tmp_path / "fleet.json"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        arguments = ["Llama-3.1-8B", "--ports", f"0,{address.partition(':')[2]}", "--announce", str(file)]
        async with serving(*arguments) as (process, _):
            rest, errors = await process.communicate()
    assert (process.returncode, rest) == (1, b""), errors
    assert address.encode() in errors
    assert not file.exists()


@pytest.mark.cluster
async def test_services_listen_where_set_says():
    names = [
        *("router.listen", "router.metrics", "router.vllm_grpc", "router.sglang_grpc", "router.smg_vllm_grpc"),
        *("worker.listen", "worker.metrics", "scheduler.listen", "scheduler.metrics", "router.engines"),
    ]
    with held_ports(len(names) + 1) as (http_port, *ports):
        addresses = dict(zip(names, [f"127.0.0.1:{port}" for port in ports], strict=True))
        addresses["router.engines"] = f'[{{listen = "{addresses["router.engines"]}", protocol = "vllm"}}]'
        given = [part for name, address in addresses.items() for part in ("--set", f"{name}={address}")]
        async with serving("Llama-3.1-8B", "--port", "1", *given, "--set", f"router.http=127.0.0.1:{http_port}") as (
            process,
            output,
        ):
            line = (await output.readline()).decode()
            assert line.startswith(f"ready: http://127.0.0.1:{http_port} "), line
            assert line.endswith(f" Lorrery's gRPC at {addresses['router.listen']}\n")
            for port in ports:  # bound here without listening: only a service lets anyone connect
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
            process.send_signal(signal.SIGTERM)
            await process.communicate()
            assert process.returncode == 0
