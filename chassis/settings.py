"""The settings of a cluster: one TOML file, read by every service and command.

Precedence: defaults < file < environment (`LORRERY_SCHEDULER__MAX_NUM_SEQS=64`) < command line (`--set
scheduler.max_num_seqs=64`). A key that does not exist, or a value that cannot be, is a `SettingsError` that names the
key. Names follow S-LoRA (`max_total_token_num`, `batch_max_tokens`, `running_max_req_size`, `max_req_input_len`,
`max_req_total_len`) and vLLM (`max_num_seqs`, `max_num_batched_tokens`, `max_loras`, `block_size`).

Every duration is in seconds. Where a comment says *device seconds*, `time_scale` stretches it; all others are wall
time.
"""

import os
import tomllib
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings import SettingsError as SourceError

from chassis.combinations import batching_of, why_senseless
from chassis.errors import SettingsError

FORMAT = 1
"""Version of the settings file's format."""

ENV_PREFIX = "LORRERY_"
_NOT_SETTINGS = {"LORRERY_CONFIG", "LORRERY_SHARED"}
MAX_PORT = 65_535
_MAX_SHOWN = 80


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > MAX_PORT:
        raise ValueError(f"HOST:PORT expected, with a port of at most {MAX_PORT}, got {text!r}")
    return text


Address = Annotated[str, AfterValidator(_address), Field(description="HOST:PORT; port 0 takes a free one")]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
_PathOrNone = Annotated[Path | None, BeforeValidator(lambda path: path or None)]
Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _named(*names: str) -> AfterValidator:
    """Accept these names, and the dotted name (`module:Class`) of one from outside the tree."""

    def check(name: str) -> str:
        if name not in names and ":" not in name:
            raise ValueError(f"{name!r} is none of {', '.join(names)}, nor a dotted name, module:Class")
        return name

    return AfterValidator(check)


POLICIES = ("req_queue", "fcfs", "vtc_fair", "abort", "cluster", "peft", "pets")
BATCHINGS = ("slora_loop", "continuous", "mixed", "chunked", "static", "llm_mock")
PLACEMENTS = ("least_loaded", "round_robin", "adapter_hash", "prefix_match", "power_of_two")
PolicyName = Annotated[str, _named(*POLICIES)]
BatchingName = Annotated[str, _named(*BATCHINGS)]
PlacementName = Annotated[str, _named(*PLACEMENTS)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TlsSettings(_Section):
    """TLS of one side; empty paths mean plain text. With `ca` set a server demands client certificates."""

    cert: _PathOrNone = None
    key: _PathOrNone = None
    ca: _PathOrNone = None

    @model_validator(mode="after")
    def _pair(self) -> Self:
        if (self.cert is None) != (self.key is None):
            missing = "cert" if self.cert is None else "key"
            raise ValueError(f"cert and key go together; {missing} is not set")
        return self


class LogSettings(_Section):
    """What is logged, and how."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["console", "json"] = "console"


class AdapterSpec(_Section):
    """One adapter, or with `count` a family of them: `id-0` ... `id-(count-1)`."""

    id: Annotated[str, Field(min_length=1)]
    rank: Count
    count: Count | None = None


class AdapterSettings(_Section):
    """The adapters that requests may name."""

    max_lora_rank: Count = 64
    target_modules: Literal["qkvo", "all-linear"] = Field(
        default="qkvo", description="projections that adapters change; with the rank it gives their size"
    )
    slots_rule: Literal["slora", "exact"] = Field(
        default="slora",
        description="what an adapter takes of the KV pool: 4 x rank tokens, or as many as have its size in bytes",
    )
    max_loras: Count | None = Field(default=None, description="places on a worker's GPU; unset: as the KV pool allows")
    max_cpu_loras: Count | None = Field(default=None, description="places in a worker's host memory; unset: all")
    max_concurrent_loads: Count = 4
    loading: Literal["background", "blocking"] = Field(
        default="background", description="who waits for a load: the request in the queue, or the whole prefill step"
    )
    host_gb_per_second: PositiveSeconds = Field(
        default=24.0, description="from pinned host memory; 24 over PCIe 4.0, 50 over 5.0"
    )
    disk_gb_per_second: PositiveSeconds = Field(default=2.0, description="for an adapter not in host memory yet")
    load_failure_ratio: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="share of loads that fail, drawn by scheduler.seed"
    )
    registry: tuple[AdapterSpec, ...] = ()

    @model_validator(mode="after")
    def _unique(self) -> Self:
        seen: set[str] = set()
        for name, rank in self.expand():
            if name in seen:
                raise ValueError(f"adapter {name!r} is listed twice")
            if rank > self.max_lora_rank:
                raise ValueError(f"adapter {name!r} has rank {rank}; max_lora_rank is {self.max_lora_rank}")
            seen.add(name)
        return self

    def expand(self) -> Iterable[tuple[str, int]]:
        """Yield (adapter id, rank) of every adapter, families spelt out."""
        for spec in self.registry:
            if spec.count is None:
                yield spec.id, spec.rank
            else:
                yield from ((f"{spec.id}-{index}", spec.rank) for index in range(spec.count))


class PrefixCacheSettings(_Section):
    """Which prompt prefixes count as already computed."""

    kind: Literal["none", "static_trie", "blocks"] = "none"
    corpus: Path | None = Field(default=None, description="static_trie: prompts, one JSON array of token ids a line")
    cache_size: Annotated[int, Field(ge=0)] = 500
    trie: Path | None = Field(default=None, description="static_trie: a file that `lorrery cache` has built")
    share_within_plan: bool = Field(
        default=False, description="blocks: let a prompt use what another one computes in the same step"
    )

    @model_validator(mode="after")
    def _has_corpus(self) -> Self:
        if self.kind == "static_trie" and (self.corpus is None) == (self.trie is None):
            raise ValueError("kind = 'static_trie' needs corpus, or trie as `lorrery cache` builds it")
        return self


class SchedulerSettings(_Section):
    """How batches are formed, and what a scheduler puts up with."""

    listen: Address = "127.0.0.1:50052"
    metrics: Address = "127.0.0.1:9102"

    policy: PolicyName = "req_queue"
    batching: BatchingName | None = Field(
        default=None, description="way to batch; unset: the one the policy's original has"
    )
    strict: bool = Field(default=False, description="keep the published quirks of the policy's original")

    max_total_token_num: Count | None = Field(
        default=None, description="KV pool in tokens; unset: what each worker announces"
    )
    max_req_input_len: Count = 2048
    max_req_total_len: Count = 3072
    memory: Literal["peak", "paged", "none"] = Field(
        default="peak",
        description="reserve everybody's peak, give out blocks and preempt when they run out, or bound the count only",
    )
    block_size: Count = Field(default=16, description="paged, and prefix_cache.kind = 'blocks': tokens in a block")
    watermark: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.01, description="paged: share of the blocks that admission leaves free"
    )
    # S-LoRA's policies
    batch_max_tokens: Count | None = Field(
        default=None, description="unset: max(max_total_token_num // 6, max_req_total_len)"
    )
    running_max_req_size: Count = 1000
    prefetch: bool = Field(default=False, description="slora_loop: load the next batch's adapters ahead")
    fair_weights: tuple[Weight, ...] | dict[str, Weight] = Field(
        default=(), description="vtc_fair: shares in the order of the registry, or by adapter; missing ones are 1"
    )
    batch_num_adapters: Count | None = Field(default=None, description="cluster: distinct adapters in a batch")
    first_token_slo_seconds: Annotated[float, Field(gt=0.5)] = Field(
        default=6.0, description="abort: device seconds; who waits to within half a second of it is dropped"
    )
    # fcfs
    max_num_seqs: Count = 256
    max_num_batched_tokens: Count = 8192

    prefix_cache: PrefixCacheSettings = PrefixCacheSettings()

    placement: PlacementName = "least_loaded"
    log_placement: bool = Field(default=False, description="log for each request where it went and why")
    seed: Annotated[int, Field(ge=0)] = Field(default=0, description="of what the scheduler draws at random")
    journal: _PathOrNone = Field(
        default=None, description="JSON Lines file for what comes in and what runs, in device time; unset: none"
    )

    max_waiting_requests: Count = 10_000
    max_pending_router_tokens: Count = 1_000_000
    worker_timeout_seconds: PositiveSeconds = 5.0
    worker_wait_seconds: Seconds = 30.0
    drain_seconds: Seconds = 30.0

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.max_req_input_len >= self.max_req_total_len:
            raise ValueError(
                f"max_req_input_len ({self.max_req_input_len}) must be less than"
                f" max_req_total_len ({self.max_req_total_len})"
            )
        if self.max_total_token_num is not None and self.max_total_token_num < self.max_req_total_len:
            raise ValueError(
                f"max_total_token_num ({self.max_total_token_num}) must be at least"
                f" max_req_total_len ({self.max_req_total_len})"
            )
        if self.batch_max_tokens is not None and self.batch_max_tokens < self.max_req_total_len:
            raise ValueError(
                f"batch_max_tokens ({self.batch_max_tokens}) must be at least"
                f" max_req_total_len ({self.max_req_total_len})"
            )
        whole_prompts = self.policy == "fcfs" and self.batching not in ("chunked", "llm_mock")
        if whole_prompts and self.max_num_batched_tokens < self.max_req_total_len:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least"
                f" max_req_total_len ({self.max_req_total_len}): a resumed or preempted sequence is prefilled in one"
                " step, unless batching = 'chunked'"
            )
        why = why_senseless(dict(self) | {"batching": self.batching or batching_of(self.policy)})
        if why is not None:
            raise ValueError(why)
        return self


class OutputSettings(_Section):
    """What the mock model answers."""

    mode: Literal["random", "echo"] = "random"
    length_model: Literal["lognormal", "llm-mock"] = Field(
        default="lognormal", description="where EOS falls if the request gives no true length and EOS is not ignored"
    )
    # Azure's 2023 conversation trace: p50 129, mean 211 tokens, so sigma = sqrt(2 ln(211 / 129)).
    length_median: PositiveSeconds = 129.0
    length_sigma: Seconds = 0.99


class LoraSettings(_Section):
    """How the engine computes adapters; docs/step-time.md says what each costs."""

    padding: Literal["none", "batch", "max_lora_rank"] = Field(
        default="none", description="rank that kernels run at: each adapter's, the batch's largest, the deployment's"
    )
    launch_us: Annotated[float, Field(ge=0)] = Field(
        default=5.0, description="microseconds per kernel, two per projection; 1 to 2 inside a CUDA graph"
    )
    sharded: bool = Field(default=False, description="tensor parallelism cuts both matrices of an adapter")


class WorkerSettings(_Section):
    """The mock GPU, and how its worker finds its scheduler."""

    scheduler: Address = "127.0.0.1:50052"
    listen: Address = Field(default="127.0.0.1:0", description="health only")
    metrics: Address = "127.0.0.1:0"

    gpu: str = "A100-80-SXM"
    tensor_parallel: Count = 1
    step_time: Literal["roofline", "naive-roofline", "llm-mock", "table", "fitted"] = "roofline"
    profile: Path | None = Field(
        default=None, description="table: CSV of measured batches; fitted: CSV of an engine's steps"
    )
    engine: str = Field(default="present-day", description="the CPU's share of a step, and which kernels run")
    weight_dtype: Literal["float16", "bfloat16", "fp8", "int8", "int4"] = "bfloat16"
    kv_dtype: Literal["float16", "bfloat16", "fp8"] = "bfloat16"
    lora: LoraSettings = LoraSettings()
    startup_seconds: Seconds = Field(default=0.0, description="device seconds until the weights are loaded")
    output: OutputSettings = OutputSettings()

    heartbeat_seconds: PositiveSeconds = 1.0
    drain_seconds: Seconds = 30.0

    @model_validator(mode="after")
    def _has_profile(self) -> Self:
        if self.step_time in ("table", "fitted") and self.profile is None:
            raise ValueError(f"step_time = {self.step_time!r} needs profile")
        return self


class RouterSettings(_Section):
    """The client side."""

    listen: Address = "127.0.0.1:50051"
    metrics: Address = "127.0.0.1:9101"
    schedulers: Annotated[tuple[Address, ...], Field(min_length=1)] = ("127.0.0.1:50052",)

    tokenizer: Path | None = Field(default=None, description="a tokenizer.json; unset: the built-in vocabulary")
    max_open_requests: Count = 20_000
    max_pending_tokens: Count = Field(default=4096, description="tokens that may wait for one slow reader")
    max_flush_gap_seconds: Seconds = Field(default=0.08, description="longest time tokens are held back under overload")
    resume_timeout_seconds: Seconds = 60.0
    drain_seconds: Seconds = 30.0


class _StrictEnv(EnvSettingsSource):
    """The environment, in which a `LORRERY_` name that is no setting is an error, and so is a value that is no JSON."""

    def __call__(self) -> dict[str, Any]:
        for name in os.environ:
            if name.startswith(ENV_PREFIX) and name not in _NOT_SETTINGS:
                section = name.removeprefix(ENV_PREFIX).split("__")[0].lower()
                if section not in self.settings_cls.model_fields:
                    raise SettingsError(f"environment variable {name} names no setting")
        try:
            return super().__call__()
        except SourceError:
            raise self._malformed() from None

    def _malformed(self) -> SettingsError:
        """Find the variable whose value cannot be read; pydantic tells its section only."""
        for name, value in os.environ.items():
            if not name.startswith(ENV_PREFIX) or name in _NOT_SETTINGS:
                continue
            self.env_vars = {name.lower(): value}
            try:
                super().__call__()
            except SourceError:
                form = self._form(name)
                return SettingsError(f"environment variable {name}: {form} expected, got {value!r}")
        return SettingsError("environment: a value cannot be read")

    def _form(self, name: str) -> str:
        """Say what a variable's value must look like."""
        kind: Any = self.settings_cls
        for part in name.removeprefix(ENV_PREFIX).lower().split("__"):
            kind = kind.model_fields[part].annotation
            if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
                return f"""a JSON list such as '{'["HOST:PORT"]' if part == "schedulers" else "[...]"}'"""
        return f"a JSON object, or one setting of it as {name}__SETTING"


class Settings(BaseSettings):
    """A whole cluster. Read it with `load`."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        nested_model_default_partial_update=True,
    )

    format: int = FORMAT
    model: str = "Llama-2-7B"
    catalogue: tuple[Path, ...] = Field(default=(), description="TOML files with further GPUs, models, engines")
    time_scale: PositiveSeconds = Field(default=1.0, description="2 = everything takes twice as long")
    adapters: AdapterSettings = AdapterSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    worker: WorkerSettings = WorkerSettings()
    router: RouterSettings = RouterSettings()
    server_tls: TlsSettings = TlsSettings()
    client_tls: TlsSettings = TlsSettings()
    log: LogSettings = LogSettings()

    @model_validator(mode="after")
    def _known_format(self) -> Self:
        if self.format != FORMAT:
            raise ValueError(f"format {self.format} is not known; this version reads format {FORMAT}")
        return self

    @model_validator(mode="after")
    def _weights_have_adapters(self) -> Self:
        num_weights, num_adapters = len(self.scheduler.fair_weights), sum(1 for _ in self.adapters.expand())
        if isinstance(self.scheduler.fair_weights, tuple) and num_weights > num_adapters:
            raise ValueError(
                f"scheduler.fair_weights has {num_weights} weights; the registry has {num_adapters} adapters"
            )
        return self

    def fair_weights(self) -> dict[str, Fraction]:
        """Return the weights that are set, by adapter; decimal fractions are taken as written."""
        weights = self.scheduler.fair_weights
        by_adapter = (
            weights.items()
            if isinstance(weights, dict)
            else zip((name for name, _ in self.adapters.expand()), weights, strict=False)
        )
        return {name: Fraction(str(weight)) for name, weight in by_adapter}

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take only what is given: `load` merges file, environment and command line, and must know what came whence."""
        return (init_settings,)


def load(path: Path | None = None, overrides: Iterable[str] = ()) -> Settings:
    """Read the settings.

    Args:
        path: TOML file; unset: `LORRERY_CONFIG`, and if that is unset too, defaults only.
        overrides: `section.key=value` strings; the value is TOML, or a bare string.

    Raises:
        SettingsError: a file that cannot be read, an unknown key or format, an impossible value; names the file, the
            environment or `--set`, whichever it came with.
    """
    if path is None and (name := os.environ.get("LORRERY_CONFIG")):
        path = Path(name)
    from_command_line: dict[str, Any] = {}
    for override in overrides:
        _merge(from_command_line, _parse_override(override))
    sources = (
        (f"file {path}", _read_toml(path) if path is not None else {}),
        ("environment", _StrictEnv(Settings)()),
        ("--set", from_command_line),
    )
    merged: dict[str, Any] = {}
    for _, source in sources:
        _merge(merged, source)
    try:
        return Settings.model_validate(merged)
    except ValidationError as error:
        what = _in_words(error)
    raise SettingsError(f"{what} ({_culprit(what, sources)})")


def _in_words(error: ValidationError) -> str:
    """Say the first thing that is wrong: the key, what is expected, and the value."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"]) or "settings"
    if first["type"] == "extra_forbidden":
        return f"{key}: no such setting"
    message, value = first["msg"], first["input"]
    # Our own messages tell the values that matter; where a key is missing, the value would be its whole section.
    if first["type"] in ("value_error", "missing"):
        return f"{key}: {message.removeprefix('Value error, ')}"
    shown = repr(value)
    if len(shown) > _MAX_SHOWN:
        shown = f"{shown[:_MAX_SHOWN]}..."
    return f"{key}: {message}, got {shown}"


def _culprit(what: str, sources: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    """Name the source with which the settings first have this fault; each may only be wrong beside those before it."""
    merged: dict[str, Any] = {}
    for name, source in sources:
        _merge(merged, source)
        try:
            Settings.model_validate(merged)
        except ValidationError as error:
            if _in_words(error) == what:
                return name
    raise AssertionError("all sources together have the fault")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path}: {error}") from None


def _parse_override(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise SettingsError(f"--set {text}: expected section.key=value")
    try:
        parsed: Any = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    for part in reversed(key.strip().split(".")):
        parsed = {part: parsed}
    result: dict[str, Any] = parsed
    return result


def _merge(into: dict[str, Any], source: Mapping[str, Any]) -> None:
    for key, value in source.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value if not isinstance(value, Mapping) else dict(value)
