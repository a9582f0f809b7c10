"""Converts the flags of `lorrery serve` to settings of a cluster, a number of workers, and API keys; writes them.

A flag that is not given leaves the value of `engine = "vllm"` (`service/settings/data/presets.toml`).
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from lorrery.cli.serve.flags import FLAGS
from lorrery.cli.serve.values import SECONDS, port_numbers, read_adapters, refusals, seconds, size, values_of, wide
from lorrery.scheduler.core.policies import batching_of, way_of
from lorrery.service.errors import SettingsError
from lorrery.service.files.reading import to_toml
from lorrery.service.names import quoted
from lorrery.service.settings.cluster import FORMAT, Settings, changed
from lorrery.service.settings.presets import MAX_LORA_RANKS
from lorrery.service.settings.reading import merge, nested
from lorrery.worker.build import deployment_of, read_catalogue
from lorrery.worker.device.catalogue.hardware import CatalogueError
from lorrery.worker.device.deployment import kv_bytes_per_token

MAX_MODEL_LEN = 8192
"""Most tokens of a prompt and its output of a model whose own are not in the catalogue."""
LONG = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
"""Environment variable that allows a longer --max-model-len than the model's own, as in vLLM."""
_BLOCK = 16
"""What vLLM's --block-size is a multiple of, apart from the smaller ones."""

_OWN: Mapping[str, Any] = {
    "engine": "vllm",
    "log.level": "warning",
    "router.http": "127.0.0.1:8000",
    "router.mock_adapters": False,
    "scheduler.max_req_total_len": MAX_MODEL_LEN,  # until the pool is known
    "scheduler.max_req_input_len": MAX_MODEL_LEN - 1,
    "worker.gpu": "H100-SXM",
}
"""Settings of this command; batching, memory and step times are those of the engine's preset (`service/settings`)."""
_WEIGHTS = {
    "auto": "bfloat16",
    "bfloat16": "bfloat16",
    "half": "float16",
    "float16": "float16",
}
_QUANTIZED = {
    **dict.fromkeys(("fp8", "ptpc_fp8", "fbgemm_fp8", "modelopt"), "fp8"),
    **dict.fromkeys(("nvfp4", "modelopt_fp4"), "nvfp4"),
    **dict.fromkeys(("mxfp4", "gpt_oss_mxfp4"), "mxfp4"),
    **dict.fromkeys(("int8", "w8a8", "experts_int8"), "int8"),
    **dict.fromkeys(("int4", "awq", "awq_marlin", "gptq", "gptq_marlin", "bitsandbytes", "compressed-tensors"), "int4"),
}
_ENDINGS = {"fp8": "fp8", "awq": "int4", "int4": "int4", "gptq": "int4", "nvfp4": "nvfp4"}
"""Last part of a checkpoint's name -> type of its weights."""
_MOE_BACKENDS = {"auto": "auto", "marlin": "marlin"}
_KV_CACHE = {"auto": "bfloat16", "bfloat16": "bfloat16", "float16": "float16", "half": "float16"} | dict.fromkeys(
    ("fp8", "fp8_e4m3", "fp8_e5m2"), "fp8"
)
_TOOL_CALL_PROBABILITY = 0.5
_KV_EVENTS = ("endpoint", "replay_endpoint", "buffer_steps", "hwm", "topic")
_LOG_LEVELS = {"critical": "error", "trace": "debug"}
_NO_KEYS = "# --api-key: router.keys is a file with the keys' SHA-256, see lorrery keys new --help.\n"
_AUTO = ("auto", "-1")
"""Values of --max-model-len for the longest requests that fit."""


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine to run.

    Attributes:
        values: settings by dotted name, without those of `--set`.
        overrides: the values of `--set`.
        num_workers: number of workers.
        api_keys: clients must show one of these; empty: none needed.
    """

    values: dict[str, Any]
    overrides: tuple[str, ...]
    num_workers: int
    api_keys: tuple[str, ...]

    @property
    def settings(self) -> Settings:
        """The settings, without the environment."""
        return _settings(self.values, self.overrides)


def _settings(values: Mapping[str, Any], overrides: Iterable[str]) -> Settings:
    """Return the settings of these values and of `--set`, checked together: either may allow the other."""
    tables: dict[str, Any] = {}
    for key, value in values.items():
        merge(tables, nested(key, value))
    return changed(tables, overrides)


def engine_of(model: str | None, given: Mapping[str, Any], overrides: Iterable[str]) -> Engine:
    """Return the engine that the flags describe.

    Args:
        model: the argument MODEL.
        given: the flags' values by `Flag.key`; None: not given.
        overrides: the values of `--set`.

    Raises:
        SettingsError: an invalid value; the message names the flag or the setting, and the valid values.
    """
    flags = {key: value for key, value in given.items() if value not in (None, [])}
    overrides = tuple(overrides)
    _without_effect(flags)
    values = dict(_OWN)
    named = _model(model, flags.pop("model", None))
    values |= {"router.served_model_names": [named], "router.model_root": named}
    values |= {flag.sets: flags.pop(flag.key) for flag in FLAGS if flag.plain and flag.key in flags}
    _formats(flags, values)
    _ways(flags, values, overrides)
    _adapters(flags, values, overrides)
    _server(flags, values)
    _time_and_faults(flags, values)
    _steps(flags, values)
    _kv_events(flags, values)
    values["model"], stored = _in_catalogue(named, _settings(values, overrides).catalogue)
    if "quantization" not in flags and stored not in _WEIGHTS.values():
        values["worker.weight_dtype"] = stored  # whatever --dtype says, which is the type of what they are unpacked to
    _memory(flags, values, overrides)
    settings = _settings(values, overrides)
    _flags_have_effect(given, values, settings)
    workers = settings.num_worker_processes(flags.get("data_parallel_size"), 1)
    return Engine(values, overrides, workers, tuple(flags.get("api_key", ())))


def fleet_ports(replicas: int | None, ports: str | None, given: Mapping[str, Any]) -> list[int | None]:
    """Return the HTTP port of each engine, 0 for a free one; None: as the flags of the only one say.

    Args:
        replicas: the value of `--replicas`; None: not given.
        ports: that of `--ports`.
        given: the other flags' values by `Flag.key`.

    Raises:
        SettingsError: they contradict each other, or --ports has another form.
    """
    if ports is None and replicas in (None, 1):
        return [None]
    numbers = port_numbers(ports) if ports is not None else [0] * (replicas or 1)
    if replicas not in (None, len(numbers)):
        raise SettingsError(f"--ports {ports}: ports for {len(numbers)}, and --replicas {replicas}; leave one out")
    if given.get("port") is not None:
        raise SettingsError(f"--port {given['port']}: each engine of a fleet has its own; give --ports instead")
    if given.get("grpc_port") and len(numbers) > 1:
        raise SettingsError(
            f"--grpc-port {given['grpc_port']}: each engine of a fleet has its own, which its ready line and --announce"
            " name; leave it out"
        )
    return [*numbers]


def _flags_have_effect(given: Mapping[str, Any], values: Mapping[str, Any], settings: Settings) -> None:
    """Refuse a flag whose setting every group of workers overrides.

    Raises:
        SettingsError: names the flag and the setting.
    """
    groups = [group.overrides for group in settings.workers]
    for flag in FLAGS:
        value = given.get(flag.key)
        for key in re.findall(r"worker\.[\w.]+", flag.sets) if value not in (None, []) else ():
            given_to_all = nested(key, values[key]) if key in values else {}
            if (why := Settings.without_effect([{"workers": groups}, given_to_all])) is not None:
                raise SettingsError(f"--{flag.key.replace('_', '-')} {value}: {why}")


def _without_effect(flags: Mapping[str, Any]) -> None:
    """Refuse another value than the one that a flag may have.

    Raises:
        SettingsError: names the flag, the value, and what to do instead.
    """
    for flag in FLAGS:
        if flag.only is not None and flags.get(flag.key, flag.only) != flag.only:
            raise SettingsError(f"{flag.names[0]} {flags[flag.key]}: it must be {flag.only}; {flag.why}")


def _model(positional: str | None, named: str | None) -> str:
    if positional is None and named is None:
        raise SettingsError("no model is named; give one of the catalogue: lorrery serve meta-llama/Llama-3.1-8B")
    if None not in (positional, named) and positional != named:
        raise SettingsError(f"two models are named, {positional} and --model {named}; give one")
    return positional or named or ""


def _in_catalogue(name: str, catalogue: Iterable[Path]) -> tuple[str, str]:
    """Return the catalogue's name for a model, the same for every service of a cluster, and its checkpoint's type.

    The type is that of the published checkpoint, or the one that the name ends with: Qwen3-32B-AWQ.
    """
    known = read_catalogue(catalogue)
    try:
        model = known.model(name)
    except CatalogueError as error:
        head, _, last = name.rpartition("-")
        stored = _ENDINGS.get(last.lower())
        if stored is None:
            raise SettingsError(f"--model: {error}") from None
        return _in_catalogue(head, catalogue)[0], stored
    return model.name, model.checkpoint


def _one_of(flag: str, value: str, known: Mapping[str, str]) -> str:
    if value not in known:
        raise SettingsError(f"{flag} {value}: it must be one of {', '.join(known)}")
    return known[value]


def _formats(flags: Mapping[str, Any], values: dict[str, Any]) -> None:
    if "dtype" in flags:
        values["worker.weight_dtype"] = _one_of("--dtype", flags["dtype"], _WEIGHTS)
    if "quantization" in flags:
        values["worker.weight_dtype"] = _one_of("--quantization", flags["quantization"], _QUANTIZED)
    if "moe_backend" in flags:
        values["worker.moe_backend"] = _one_of("--moe-backend", flags["moe_backend"].lower(), _MOE_BACKENDS)
    if "kv_cache_dtype" in flags:
        values["worker.kv_dtype"] = _one_of("--kv-cache-dtype", flags["kv_cache_dtype"], _KV_CACHE)


def _ways(flags: Mapping[str, Any], values: dict[str, Any], overrides: tuple[str, ...]) -> None:
    if not flags.get("enable_prefix_caching", True):
        values["scheduler.prefix_cache.kind"] = "none"
    block = values.get("scheduler.block_size", _BLOCK)
    if block not in (1, 8) and block % _BLOCK:
        raise SettingsError(f"--block-size {block}: it must be 1, 8, or a multiple of {_BLOCK}")
    _batches(flags, values, overrides)


def _batches(flags: Mapping[str, Any], values: dict[str, Any], overrides: tuple[str, ...]) -> None:
    """Set a step's tokens and sequences: each of a decode needs one, and sequences not given are as many as fit."""
    if "max_num_batched_tokens" in flags:
        values["scheduler.max_num_batched_tokens"] = size("--max-num-batched-tokens", flags["max_num_batched_tokens"])
    scheduler = _settings(values, overrides).scheduler
    tokens, sequences = scheduler.step_tokens, scheduler.max_num_seqs
    if tokens >= sequences:
        return
    if "scheduler.max_num_seqs" in values:
        raise SettingsError(
            f"--max-num-batched-tokens {tokens}: it must be at least --max-num-seqs, {sequences}: a step computes a"
            " token of each; raise it, or give fewer sequences"
        )
    values["scheduler.max_num_seqs"] = max(1, tokens)


def _adapters(flags: Mapping[str, Any], values: dict[str, Any], overrides: tuple[str, ...]) -> None:
    own = _settings(values, overrides).adapters
    if own.max_loras is not None and own.host_places is not None and own.host_places < own.max_loras:
        raise SettingsError(
            f"--max-cpu-loras {own.host_places}: it must be at least --max-loras, {own.max_loras}; raise it, or leave"
            " it out"
        )
    most = own.max_lora_rank
    if most not in MAX_LORA_RANKS:
        raise SettingsError(f"--max-lora-rank {most}: it must be one of {', '.join(map(str, MAX_LORA_RANKS))}")
    adapters = read_adapters(flags.get("lora_modules", ()), most)
    for one in adapters:
        if one.rank > most:
            raise SettingsError(
                f"--lora-modules: adapter {one.name!r} has rank {one.rank}; --max-lora-rank is {most}; raise it"
            )
    values["adapters.registry"] = [
        {"id": one.name, "rank": one.rank} | ({} if one.path is None else {"path": one.path}) for one in adapters
    ]
    modules = {*values_of(flags.get("lora_target_modules", ())), *(name for one in adapters for name in one.modules)}
    if wide(modules):
        values["adapters.target_modules"] = "all-linear"


def _server(flags: Mapping[str, Any], values: dict[str, Any]) -> None:
    host, port = values["router.http"].split(":")
    host = flags.get("host", host)
    host = f"[{host.strip('[]')}]" if ":" in host else host
    values["router.http"] = f"{host}:{flags.get('port', port)}"
    if "grpc_port" in flags:
        values["router.listen"] = f"{host}:{flags['grpc_port']}"
    if "uvicorn_log_level" in flags:
        level = str(flags["uvicorn_log_level"]).lower()
        values["log.level"] = _LOG_LEVELS.get(level, level)
    if "shutdown_timeout" in flags:
        values |= {f"{one}.drain_seconds": flags["shutdown_timeout"] for one in ("router", "worker", "scheduler")}


def _time_and_faults(flags: Mapping[str, Any], values: dict[str, Any]) -> None:
    if "startup_duration" in flags:
        values["worker.startup_seconds"] = seconds("--startup-duration", flags["startup_duration"], SECONDS[""])
    if "seed" in flags:
        values |= {"router.seed": flags["seed"], "scheduler.seed": flags["seed"]}
    auto = bool(flags.get("enable_auto_tool_choice"))
    if auto and "tool_call_parser" not in flags:
        raise SettingsError("--enable-auto-tool-choice needs --tool-call-parser; give one, such as hermes")
    values["router.tool_calls"] = "auto" if auto else "required" if "tool_call_parser" in flags else "none"
    if auto:
        values["router.tool_call_probability"] = _TOOL_CALL_PROBABILITY
    if flags.get("exclude_tools_when_tool_choice_none"):
        values["router.exclude_tools_when_tool_choice_none"] = True
    if "speedup_ratio" in flags:
        ratio = flags["speedup_ratio"]
        if not 0 < ratio < float("inf"):
            raise SettingsError(
                f"--speedup-ratio {ratio:g}: it must be above 0; a step always takes some time, try 1000"
            )
        values["time_scale"] = 1 / ratio
    if "failure_types" in flags and "failure_injection_rate" not in flags:
        raise SettingsError("--failure-types needs --failure-injection-rate, the share of requests that fail")
    if flags.get("failure_injection_rate"):
        kinds = list(values_of(flags.get("failure_types", ())))
        values["faults"] = refusals(flags["failure_injection_rate"], kinds, flags.get("seed", 0))


def _steps(flags: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Set constant step times in place of a GPU's."""
    given = {
        key: seconds(f"--{key.replace('_', '-')}", flags[key], SECONDS["ms"]) * 1000
        for key in ("inter_token_latency", "time_to_first_token", "prefill_overhead", "prefill_time_per_token")
        if key in flags
    }
    if not given:
        return
    step_ms = given.get("inter_token_latency", 0.0)
    if step_ms <= 0:
        raise SettingsError(
            f"--{next(iter(given)).replace('_', '-')}: a step always takes some time;"
            " give --inter-token-latency too, above 0"
        )
    if "time_to_first_token" in given and given.keys() & {"prefill_overhead", "prefill_time_per_token"}:
        raise SettingsError("--time-to-first-token and --prefill-... both say how long a prompt takes; give one")
    before_token_ms = given.get("time_to_first_token", given.get("prefill_overhead", 0.0))
    values |= {
        "worker.step_time": "constant",
        "worker.constant.step_ms": step_ms,
        "worker.constant.prefill_ms": max(before_token_ms - step_ms, 0.0),
        "worker.constant.prefill_token_ms": given.get("prefill_time_per_token", 0.0),
    }


def _kv_events(flags: Mapping[str, Any], values: dict[str, Any]) -> None:
    if "use_vllm_map_event_format" in flags:
        values["worker.kv_events.format"] = "map" if flags["use_vllm_map_event_format"] else "array"
        values["worker.kv_events.replay_topic"] = flags["use_vllm_map_event_format"]
    if "kv_events_config" not in flags:
        return
    text = flags["kv_events_config"]
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"--kv-events-config {quoted(text)}: no JSON: {error}") from None
    if not isinstance(config, dict):
        raise SettingsError(f"--kv-events-config {text}: a JSON object expected")
    publisher = config.get("publisher")
    if publisher not in (None, "null", "zmq"):
        raise SettingsError(f"--kv-events-config: publisher is {quoted(str(publisher))}; it must be null or zmq")
    if unknown := config.keys() - _KV_EVENTS - {"enable_kv_cache_events", "publisher", "max_queue_size"}:
        raise SettingsError(
            f"--kv-events-config: {', '.join(sorted(unknown))} has no meaning here; it may have {', '.join(_KV_EVENTS)}"
        )
    if not config.get("enable_kv_cache_events") or publisher == "null":
        return
    found = {"endpoint": "tcp://*:5557", **{key: config[key] for key in _KV_EVENTS if config.get(key) is not None}}
    values |= {f"worker.kv_events.{key}": value for key, value in found.items()}


def _memory(flags: Mapping[str, Any], values: dict[str, Any], overrides: tuple[str, ...]) -> None:
    """Set the size of the KV pool if a flag gives it, and the longest request."""
    # Lengths come last: the pool size depends on all other settings.
    settings = _settings(values, overrides)
    deployments = [deployment_of(kind) for kind, _ in settings.kinds(1)]
    deployment = deployments[0]
    block = settings.scheduler.block_size
    given = [
        name
        for name in ("gpu_memory_utilization", "num_gpu_blocks_override", "kv_cache_size", "kv_cache_memory_bytes")
        if name in flags
    ]
    if len(given) > 1:
        raise SettingsError(f"--{' and --'.join(given).replace('_', '-')} both say how large the KV cache is; give one")
    if given and len(deployments) > 1:
        raise SettingsError(
            f"--{given[0].replace('_', '-')} gives all workers one size of KV cache; with groups of them (workers=...)"
            " each has what its memory holds: leave it out"
        )
    try:
        if "num_gpu_blocks_override" in flags:
            pool = flags["num_gpu_blocks_override"] * block
        elif "kv_cache_size" in flags:
            pool = flags["kv_cache_size"] * block
        elif "kv_cache_memory_bytes" in flags:
            all_bytes = size("--kv-cache-memory-bytes", flags["kv_cache_memory_bytes"]) * deployment.tensor_parallel
            pool = all_bytes // kv_bytes_per_token(deployment.model, deployment.tensor_parallel, deployment.precision)
        elif "gpu_memory_utilization" in flags:
            pool = deployment.kv_pool_tokens(used=_share(flags["gpu_memory_utilization"]))
        else:
            pool = settings.scheduler.max_total_token_num or max(one.kv_pool_tokens() for one in deployments)
    except CatalogueError as error:
        raise SettingsError(f"--gpu, --tensor-parallel-size, --gpu-memory-utilization, --model: {error}") from None
    pool = pool // block * block
    own = deployment.model.max_model_len
    given_length = flags.get("max_model_len", _AUTO[0])
    spare = block if "num_gpu_blocks_override" in flags and pool > block else 0  # vLLM never gives out its first block
    longest = (
        min(own or MAX_MODEL_LEN, pool - spare) if given_length in _AUTO else size("--max-model-len", given_length)
    )
    if own is not None and longest > own and os.environ.get(LONG) != "1":
        raise SettingsError(
            f"--max-model-len {longest}: {deployment.model.name} takes {own} tokens; give fewer, or set {LONG}=1"
        )
    if longest > pool:
        raise SettingsError(
            f"--max-model-len {longest}: the KV cache holds {pool} tokens; give fewer, or --gpu-memory-utilization,"
            " --num-gpu-blocks-override, --tensor-parallel-size"
        )
    if given:
        values["scheduler.max_total_token_num"] = pool - spare if longest <= pool - spare else pool
    if longest < 2:
        raise SettingsError(f"--max-model-len {longest}: a prompt and its output have at least 2 tokens")
    threshold = values.get("scheduler.long_prefill_token_threshold", 0)
    if threshold > longest:
        raise SettingsError(
            f"--long-prefill-token-threshold {threshold}: it must be at most --max-model-len, {longest}"
        )
    values |= {"scheduler.max_req_total_len": longest, "scheduler.max_req_input_len": longest - 1}
    # As in vLLM: a prompt that is not computed in chunks has to fit in one step.
    in_chunks = flags.get("enable_chunked_prefill", settings.scheduler.enable_chunked_prefill)
    way = way_of(batching_of(settings.scheduler.policy, settings.scheduler.batching))
    if (way.prompt_bound or not in_chunks) and "scheduler.max_num_batched_tokens" not in values:
        values["scheduler.max_num_batched_tokens"] = max(settings.scheduler.step_tokens, longest)
    if not in_chunks:
        values["scheduler.enable_chunked_prefill"] = False


def _share(value: float) -> Fraction:
    if not 0 < value <= 1:
        raise SettingsError(f"--gpu-memory-utilization {value:g}: it must be above 0 and at most 1")
    return Fraction(str(value))


def settings_file(engine: Engine) -> str:
    """Return a settings file with which `lorrery up --config FILE` runs what `lorrery serve` runs."""
    workers = f" --workers {engine.num_workers}"
    head = f"# What the flags amount to; run it with lorrery up{workers} --config FILE.\n"
    if engine.api_keys:
        head += _NO_KEYS
    return f"{head}\n{to_toml(settings_tables(engine.settings))}"


def settings_tables(settings: Settings) -> dict[str, Any]:
    """Return the tables of a settings file with these settings, without what its engine's preset gives."""
    scheduler = settings.scheduler
    base: dict[str, object] = {
        "model": settings.model,
        "engine": settings.engine,
        "catalogue": settings.catalogue,
        "worker.gpu": settings.worker.gpu,
        "scheduler.max_req_input_len": scheduler.max_req_input_len,
        "scheduler.max_req_total_len": scheduler.max_req_total_len,
    }
    tables: dict[str, Any] = {"format": FORMAT}
    for key, value in base.items():
        if value not in (None, ()):
            merge(tables, nested(key, value))
    # Values that follow from the engine's preset are not repeated.
    merge(tables, _unlike(settings.model_dump(), changed({}, base).model_dump()))
    return tables


def _unlike(tables: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that differ from the defaults."""
    found: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping) and isinstance(defaults.get(key), Mapping):
            if inner := _unlike(value, defaults[key]):
                found[key] = inner
        elif value != defaults.get(key):
            found[key] = value
    return found
