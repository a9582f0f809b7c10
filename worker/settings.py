"""The settings of a worker: its mock GPU, what it answers and where its scheduler is; and of groups of workers.

A group in `[[workers]]` inherits `[worker]` and overrides it key by key, wherever `[worker]`'s value comes from. Worker
processes are named `worker-0`, `worker-1` and so on, group by group. `worker.group` selects the group of a process,
whose settings are then those of the group. To the scheduler each GPU of a process is a worker, named by
`service.names.gpu_names`.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    model_validator,
)

from lorrery.service.settings.sections import (
    LONGEST_SECONDS,
    MAX_PORT,
    Address,
    Count,
    CountOrZero,
    Interval,
    Name,
    PathOrNone,
    PositiveSeconds,
    Seconds,
    Section,
    Table,
    Target,
)


def _expert_groups(value: object) -> int | bool:
    """Parse a number of groups; true and false are accepted too, also as text from the environment."""
    text = str(value).strip().lower()
    if text in ("true", "false"):
        return text == "true"
    if isinstance(value, int | str) and text.isascii() and text.isdecimal() and int(text) >= 1:
        return int(text)
    raise ValueError(f"a whole number of at least 1 expected, or true for as many groups as GPUs, got {value!r}")


_MOST_GB = 1_000_000


def _activation_gb(value: object) -> float | Literal["profiled"]:
    """Parse a number of GB, or `profiled`."""
    if value == "profiled":
        return "profiled"
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if 0 <= number <= _MOST_GB:
        return number
    raise ValueError(f"profiled, or a number at least 0 and at most {_MOST_GB:,}, expected, got {value!r}")


ExpertGroups = Annotated[int | bool, PlainValidator(_expert_groups)]


class OutputSettings(Section):
    """What the mock model generates."""

    mode: Literal["random", "echo", "logits"] = Field(
        default="random",
        description="how output tokens are chosen: random: words drawn from the request's seed alone; echo: the prompt"
        " again; logits: words drawn from synthetic logits, which honour temperature, top_p, top_k, penalties and"
        " do_sample (0.1 ms of CPU per token)",
    )
    length_model: Literal["lognormal", "llm-mock"] = Field(
        default="lognormal", description="output length if the request gives no true length and EOS is not ignored"
    )
    # Azure's 2023 conversation trace: p50 129, mean 211 tokens, so sigma = sqrt(2 ln(211 / 129)).
    length_median: PositiveSeconds = Field(default=129.0, description="lognormal: median output, in tokens")
    length_sigma: Seconds = Field(
        default=0.99, description="lognormal: standard deviation of the logarithm of the output length in tokens"
    )


class LoraSettings(Section):
    """How the engine computes adapters; docs/step-time.md gives the cost of each choice."""

    padding: Literal["none", "batch", "max_lora_rank"] = Field(
        default="none",
        description="rank at which kernels run: none: each adapter's own; batch: the largest in the batch;"
        " max_lora_rank: the deployment's maximum",
    )
    kernels: Literal["roofline", "grouped", "segmented"] = Field(
        default="roofline",
        description="how kernel times are modelled: roofline: from memory traffic, arithmetic and launches; grouped:"
        " from measurements of vLLM's kernels; segmented: of SGLang's",
    )
    projections: Literal["adapted", "all-linear"] = Field(
        default="adapted",
        description="at which projections kernels run in a step with adapters: adapted: those of"
        " adapters.target_modules; all-linear: all, whatever the adapters modify (vLLM, unless it is told its target"
        " modules); of a model with experts always the adapted ones",
    )
    graph_sequences: Count | None = Field(
        default=None,
        description="segmented: sequences of the largest CUDA graph (SGLang's cuda-graph-max-bs), for which the grids"
        " of every decode step have room, as those of prefills for max_num_batched_tokens; unset: each step has grids"
        " of its own size",
    )
    launch_us: Annotated[float, Field(ge=0, le=1e6)] = Field(
        default=5.0,
        description="roofline: microseconds per kernel launch, two launches per projection; 1 to 2 inside a CUDA graph",
    )
    sharded: bool = Field(default=False, description="shard both matrices of an adapter under tensor parallelism")


def _endpoint(text: str) -> str:
    transport, _, rest = text.partition("://")
    if transport == "ipc" and rest:
        return text
    host, _, port = rest.rpartition(":")
    if transport == "tcp" and host and port.isascii() and port.isdigit() and int(port) <= MAX_PORT:
        return text
    raise ValueError(f"tcp://HOST:PORT, with a port of at most {MAX_PORT}, or ipc://PATH expected, got {text!r}")


def _counted_up(endpoint: str, number: int) -> str:
    """Return address number `number`, from 0, of the series that begins with `endpoint`; port 0 means any free port."""
    host, _, port = endpoint.rpartition(":")
    if not number or port == "0":
        return endpoint
    return f"{endpoint}-{number}" if endpoint.startswith("ipc://") else f"{host}:{int(port) + number}"


Endpoint = Annotated[str, AfterValidator(_endpoint)]
EndpointOrNone = Annotated[Endpoint | None, BeforeValidator(lambda endpoint: endpoint or None)]


class KvEventsSettings(Section):
    """KV events from a worker's prefix cache, published over ZeroMQ as by vLLM; names as in its KVEventsConfig."""

    endpoint: EndpointOrNone = Field(
        default=None,
        description="where KV events are published, tcp://HOST:PORT or ipc://PATH; unset: not published. As in vLLM,"
        " the worker binds tcp://*:PORT and ipc:// (port 0: a free one), and connects to an address with a host, where"
        " a router listens",
    )
    bind: bool | None = Field(
        default=None, description="bind endpoint (true) or connect to it (false); unset: as vLLM decides"
    )
    replay_endpoint: EndpointOrNone = Field(
        default=None, description="where missed batches can be requested again; always bound; unset: no replay"
    )
    buffer_steps: Count = Field(default=10_000, description="number of most recent batches kept for replay")
    hwm: CountOrZero = Field(
        default=100_000,
        description="maximum batches queued for a slow subscriber, which misses those beyond; 0: no limit",
    )
    topic: str = Field(
        default="", description="first frame of each message; {worker} and {model} are replaced by their names"
    )
    format: Literal["array", "map"] = Field(
        default="map", description="encoding of an event: array: as in vLLM 0.18 and earlier; map: as in 0.24 and later"
    )
    replay_topic: bool = Field(
        default=True, description="start each answer of a replay with the topic, as vLLM 0.32 does and 0.24 does not"
    )

    def of_gpu(self, number: int) -> Self:
        """Return the section for GPU number `number` of a process: addresses that are listened on count up."""
        own = {"endpoint": self.endpoint if self.binds else None, "replay_endpoint": self.replay_endpoint}
        return self.model_copy(update={key: _counted_up(one, number) for key, one in own.items() if one is not None})

    @property
    def binds(self) -> bool:
        """Whether the endpoint is listened on."""
        if self.bind is not None or self.endpoint is None:
            return bool(self.bind)
        return "*" in self.endpoint or "::" in self.endpoint or self.endpoint.startswith("ipc://")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.replay_endpoint is not None and self.endpoint is None:
            raise ValueError("replay_endpoint needs endpoint")
        if self.bind is not None and self.endpoint is None:
            raise ValueError("bind needs endpoint")
        endpoint = self.endpoint
        if endpoint is not None and not self.binds and ("*" in endpoint or endpoint.endswith(":0")):
            raise ValueError(
                f"endpoint {endpoint!r} is to be connected to, and says neither which host nor which port: name both,"
                " or set bind = true"
            )
        return self


class ConstantSettings(Section):
    """Constant step times (step_time = 'constant'): step_ms, plus the other two in steps with prompt tokens."""

    step_ms: PositiveSeconds = Field(default=10.0, description="milliseconds per step, and so between two tokens")
    prefill_ms: Seconds = Field(
        default=0.0, description="additional milliseconds for a step that computes prompt tokens"
    )
    prefill_token_ms: Seconds = Field(
        default=0.0, description="additional milliseconds for each of these prompt tokens"
    )


GroupOrNone = Annotated[CountOrZero | None, BeforeValidator(lambda number: None if number == "" else number)]

MAX_GPUS = 1024
"""Upper bound on the workers of one process; a process can keep the pace of far fewer."""

OF_PROCESS: Final = frozenset(
    {
        "name",
        "group",
        "scheduler",
        "resolve_seconds",
        "listen",
        "metrics",
        "kv_events",
        "output",
        "heartbeat_seconds",
        "drain_seconds",
        "realtime",
    }
)
"""Settings of a worker that do not describe its GPU."""


class WorkerSettings(Section):
    """The mock GPU, and how a worker finds its scheduler."""

    name: Name | None = Field(
        default=None, description="name in usage, metrics, logs and faults, unique to each process; unset: HOST-PID"
    )
    group: GroupOrNone = Field(
        default=None,
        description="index, from 0, of the [[workers]] group of this process; set by `lorrery up`; unset: no group",
    )
    scheduler: Target = Field(
        default="127.0.0.1:50052",
        description="scheduler to attach to: HOST:PORT, or dns:///NAME:PORT for whichever scheduler of that name needs"
        " a worker most; dns://SERVER:PORT/NAME:PORT uses that name server",
    )
    resolve_seconds: Interval = Field(
        default=5.0,
        description="with a dns name in scheduler: how often a worker checks whether another scheduler needs it more",
    )
    listen: Address = Field(
        default="127.0.0.1:0", description="gRPC health checks only, HOST:PORT; port 0 takes a free one"
    )
    metrics: Address = Field(
        default="127.0.0.1:0", description="where Prometheus reads metrics, HOST:PORT; port 0 takes a free one"
    )

    gpu: str = Field(default="A100-80-SXM", description="GPU model, by its name in the catalogue")
    gpus: Annotated[int, Field(ge=1, le=MAX_GPUS)] = Field(
        default=1,
        description="GPUs per process, each a separate worker named NAME.0, NAME.1 and so on, or NAME if there is one;"
        " with tensor_parallel, the number of workers of that degree",
    )
    tensor_parallel: Count = Field(default=1, description="GPUs per worker")
    peer_to_peer: bool = Field(
        default=True,
        description="whether a worker's GPUs reach each other's memory, over NVLink or PCIe; false: their all-reduces"
        " go through the CPUs, as between GeForce cards and on many virtual machines",
    )
    expert_parallel: ExpertGroups = Field(
        default=False,
        description="number of GPU groups over which a mixture's experts are distributed; the GPUs of a group split"
        " each expert; true: each GPU is a group, as with vLLM's --enable-expert-parallel; false: all GPUs are one"
        " group",
    )
    expert_distribution: Literal["served", "balanced", "power_law_1.2"] = Field(
        default="served",
        description="how unevenly tokens use experts: served: as in a served model (docs/step-time.md); balanced:"
        " evenly; power_law_1.2: as in NVIDIA's kernel timings",
    )
    moe_backend: Literal["auto", "marlin"] = Field(
        default="auto",
        description="whose kernels compute a mixture's experts: auto: those that the engine chooses; marlin: Marlin's,"
        " as with vLLM's --moe-backend marlin, for gpt-oss (mxfp4)",
    )
    step_time: Literal["roofline", "naive-roofline", "llm-mock", "constant", "table", "fitted"] = Field(
        default="roofline", description="step-time model; docs/step-time.md describes each"
    )
    profile: PathOrNone = Field(
        default=None, description="table: CSV of measured batches; fitted: CSV of an engine's steps"
    )
    engine: str = Field(
        default="present-day",
        description="engine, by its name in the catalogue: the CPU's share of a step, and which kernels run",
    )
    enforce_eager: bool = Field(
        default=False,
        description="no CUDA graphs, as with vLLM's --enforce-eager and SGLang's --disable-cuda-graph: a step takes at"
        " least as long as the CPU needs to launch its kernels one by one",
    )
    api_server_count: Annotated[int, Field(ge=0, le=1024)] = Field(
        default=1,
        description="processes of the engine's HTTP front end, which share its requests and tokens; 0: none, as when an"
        " engine is used from Python",
    )
    weight_dtype: Literal["float16", "bfloat16", "fp8", "fp8_block", "int8", "int4", "nvfp4", "mxfp4"] = Field(
        default="bfloat16",
        description="number format of the base model's weights; fp8 has one scale per tensor, fp8_block one per 128 x"
        " 128 weights, nvfp4 one per 16; mxfp4 is that of gpt-oss, whose experts alone are in 4 bits",
    )
    kv_dtype: Literal["float16", "bfloat16", "fp8"] = Field(
        default="bfloat16", description="number format of the KV cache"
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.9,
        description="share of GPU memory for weights, KV cache and activations; with engine trtllm: share for the KV"
        " cache of what weights and activations leave free (free_gpu_memory_fraction)",
    )
    activation_gb: Annotated[float | Literal["profiled"], PlainValidator(_activation_gb)] = Field(
        default=2.0,
        description="GB per GPU for activations, CUDA graphs and communication; profiled: as vLLM finds by running its"
        " largest step (docs/step-time.md)",
    )
    lora: LoraSettings = LoraSettings()
    constant: ConstantSettings = ConstantSettings()
    startup_seconds: Seconds = Field(default=0.0, description="device seconds until the weights are loaded")
    output: OutputSettings = OutputSettings()
    kv_events: KvEventsSettings = KvEventsSettings()

    heartbeat_seconds: Annotated[float, Field(ge=0.01, le=LONGEST_SECONDS, allow_inf_nan=False)] = Field(
        default=1.0,
        description="interval between heartbeats to the scheduler; at most half of scheduler.worker_timeout_seconds",
    )
    drain_seconds: Seconds = Field(default=30.0, description="time for running sequences to finish after SIGTERM")
    realtime: Literal["auto", "required", "off"] = Field(
        default="auto",
        description="Linux's real-time priority, with which steps end on time beside other work on the machine"
        " (docs/fleets.md): auto: if the system allows it, as it does for root; required: or else the worker does not"
        " start; off: none",
    )

    @property
    def expert_groups(self) -> int:
        """Number of groups of GPUs among which experts are dealt."""
        return self.tensor_parallel if self.expert_parallel is True else int(self.expert_parallel) or 1

    @property
    def of_device(self) -> dict[str, Any]:
        """The settings that determine step times and memory, as JSON values."""
        return self.model_dump(mode="json", exclude={*OF_PROCESS, "gpus", "startup_seconds"})

    @model_validator(mode="after")
    def _has_profile(self) -> Self:
        if self.step_time in ("table", "fitted") and self.profile is None:
            raise ValueError(f"step_time = {self.step_time!r} needs profile")
        return self


class WorkerGroup(Table):
    """Worker processes with equal settings. Besides `count` and `autoscaler`, a group takes any setting of `[worker]`
    about its GPU, such as `gpu`, `gpus`, `tensor_parallel` or `weight_dtype`; all others are as in `[worker]`.
    """  # noqa: D205  the settings page shows it as one paragraph

    model_config = ConfigDict(extra="allow", frozen=True)

    count: Count = Field(default=1, description="number of worker processes; each hosts as many workers as gpus says")
    autoscaler: dict[str, Any] = Field(
        default={},
        description="settings of [autoscaler] that differ for this group; each group is scaled by its own rule",
    )

    @property
    def overrides(self) -> dict[str, Any]:
        """The settings in which the group differs from `[worker]`."""
        return dict(self.model_extra or {})


def of_group(worker: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `[worker]` table of a group's workers; unknown keys are kept, and refused when the table is parsed.

    Raises:
        ValueError: a key of `[worker]` that a group cannot set; the message names it.
    """
    merged = dict(worker)
    for key, value in overrides.items():
        if key in OF_PROCESS:
            raise ValueError(f"{key}: it is set for all workers, in [worker]; groups differ in their GPUs")
        before = merged.get(key)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        merged[key] = {**before, **value} if both else value  # type: ignore[dict-item]  # as just checked
    return merged
