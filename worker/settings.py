"""The settings of a worker: its mock GPU, what it answers and where its scheduler is; and of groups of workers.

A group in `[[workers]]` inherits `[worker]` and overrides it key by key, wherever `[worker]`'s value comes from. Worker
processes are named `worker-0`, `worker-1` and so on, group by group. `worker.group` selects the group of a process,
whose settings are then those of the group. To the scheduler each GPU of a process is a worker, named by
`chassis.names.gpu_names`.
"""

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

from lorrery.chassis.sections import (
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


ExpertGroups = Annotated[int | bool, PlainValidator(_expert_groups)]


class OutputSettings(Section):
    """What the mock model answers."""

    mode: Literal["random", "echo", "logits"] = Field(
        default="random",
        description="what tokens say: words drawn from the request's seed alone, the prompt again, or words drawn from"
        " synthetic logits, in which temperature, top_p, top_k, penalties and do_sample show (0.1 ms of CPU a token)",
    )
    length_model: Literal["lognormal", "llm-mock"] = Field(
        default="lognormal", description="where EOS falls if the request gives no true length and EOS is not ignored"
    )
    # Azure's 2023 conversation trace: p50 129, mean 211 tokens, so sigma = sqrt(2 ln(211 / 129)).
    length_median: PositiveSeconds = Field(default=129.0, description="lognormal: median output, in tokens")
    length_sigma: Seconds = Field(
        default=0.99, description="lognormal: standard deviation of the logarithm of the output's tokens"
    )


class LoraSettings(Section):
    """How the engine computes adapters; docs/step-time.md says what each costs."""

    padding: Literal["none", "batch", "max_lora_rank"] = Field(
        default="none", description="rank that kernels run at: each adapter's, the batch's largest, the deployment's"
    )
    kernels: Literal["roofline", "grouped"] = Field(
        default="roofline",
        description="how long they take: as memory, arithmetic and launches do, or as vLLM's, which were measured",
    )
    launch_us: Annotated[float, Field(ge=0, le=1e6)] = Field(
        default=5.0,
        description="roofline: microseconds per kernel, two per projection; 1 to 2 inside a CUDA graph",
    )
    sharded: bool = Field(default=False, description="tensor parallelism cuts both matrices of an adapter")


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
    """What a worker publishes of its prefix cache over ZeroMQ, as vLLM does; names are those of its KVEventsConfig."""

    endpoint: EndpointOrNone = Field(
        default=None,
        description="where KV events are published, tcp://HOST:PORT or ipc://PATH; unset: nowhere. As in vLLM,"
        " tcp://*:PORT and ipc:// are listened on (port 0: a free one), and an address with a host is connected to,"
        " where a router listens",
    )
    bind: bool | None = Field(
        default=None, description="listen on endpoint (true), or connect to it (false); unset: as vLLM decides"
    )
    replay_endpoint: EndpointOrNone = Field(
        default=None, description="where batches are asked for again; always listened on; unset: nowhere"
    )
    buffer_steps: Count = Field(default=10_000, description="batches that can be asked for again, the latest")
    hwm: CountOrZero = Field(
        default=100_000, description="batches that wait for a slow subscriber; it misses those beyond; 0: any number"
    )
    topic: str = Field(
        default="", description="first frame of each message; {worker} and {model} stand for their names"
    )
    format: Literal["array", "map"] = Field(
        default="map", description="how an event is written: as vLLM 0.18 and earlier do, or as 0.24 and later"
    )
    replay_topic: bool = Field(
        default=False, description="begin each frame of a replay with the topic, as vLLM 0.33 does and 0.24 does not"
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
    """Step times of constants (step_time = 'constant'): step_ms, and for a step with prompt tokens the others too."""

    step_ms: PositiveSeconds = Field(default=10.0, description="milliseconds of a step, and so between two tokens")
    prefill_ms: Seconds = Field(default=0.0, description="milliseconds more for a step that computes prompt tokens")
    prefill_token_ms: Seconds = Field(default=0.0, description="milliseconds more for each of these tokens")


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
    }
)
"""Settings of a worker that do not describe its GPU."""


class WorkerSettings(Section):
    """The mock GPU, and how its worker finds its scheduler."""

    name: Name | None = Field(
        default=None,
        description="in usage, metrics, logs and faults, another for each process; unset: HOST-PID",
    )
    group: GroupOrNone = Field(
        default=None,
        description="number of the group of [[workers]] that this process is of, from 0; `lorrery up` sets it; unset:"
        " of none",
    )
    scheduler: Target = Field(
        default="127.0.0.1:50052",
        description="scheduler to attach to: HOST:PORT, or dns:///NAME:PORT for that one of a name's which needs a"
        " worker most; dns://SERVER:PORT/NAME:PORT asks that name server",
    )
    resolve_seconds: Interval = Field(
        default=5.0, description="how often a worker that has a name looks whether another scheduler needs it more"
    )
    listen: Address = Field(
        default="127.0.0.1:0", description="gRPC health checks only, HOST:PORT; port 0 takes a free one"
    )
    metrics: Address = Field(
        default="127.0.0.1:0", description="where Prometheus reads metrics, HOST:PORT; port 0 takes a free one"
    )

    gpu: str = Field(default="A100-80-SXM", description="GPU, by its name in the catalogue")
    gpus: Annotated[int, Field(ge=1, le=MAX_GPUS)] = Field(
        default=1,
        description="GPUs that a process hosts, each a worker of its own: NAME.0, NAME.1 and so on, or NAME where it is"
        " one; with tensor_parallel, so many workers of that degree",
    )
    tensor_parallel: Count = Field(default=1, description="GPUs of one worker")
    expert_parallel: ExpertGroups = Field(
        default=False,
        description="groups of these GPUs among which a mixture's experts are dealt, those of a group cutting each"
        " expert; true: each GPU is a group, as with vLLM's --enable-expert-parallel; false: all are one",
    )
    expert_distribution: Literal["served", "balanced", "power_law_1.2"] = Field(
        default="served",
        description="how unevenly tokens use experts: as a served model's (docs/step-time.md), alike, or as in NVIDIA's"
        " kernel timings",
    )
    step_time: Literal["roofline", "naive-roofline", "llm-mock", "constant", "table", "fitted"] = Field(
        default="roofline", description="what says how long a step takes; docs/step-time.md describes each model"
    )
    profile: PathOrNone = Field(
        default=None, description="table: CSV of measured batches; fitted: CSV of an engine's steps"
    )
    engine: str = Field(default="present-day", description="the CPU's share of a step, and which kernels run")
    weight_dtype: Literal["float16", "bfloat16", "fp8", "fp8_block", "int8", "int4"] = Field(
        default="bfloat16",
        description="number format of the base model's weights; fp8 has one scale per tensor, fp8_block one per 128 x"
        " 128 weights",
    )
    kv_dtype: Literal["float16", "bfloat16", "fp8"] = Field(
        default="bfloat16", description="number format of the KV cache"
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.9,
        description="share of a GPU's memory for weights, KV cache and activations; engine trtllm: of what weights and"
        " activations leave, for the KV cache (free_gpu_memory_fraction)",
    )
    activation_gb: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = Field(
        default=2.0, description="GB of each GPU that activations, CUDA graphs and communication take"
    )
    lora: LoraSettings = LoraSettings()
    constant: ConstantSettings = ConstantSettings()
    startup_seconds: Seconds = Field(default=0.0, description="device seconds until the weights are loaded")
    output: OutputSettings = OutputSettings()
    kv_events: KvEventsSettings = KvEventsSettings()

    heartbeat_seconds: Annotated[float, Field(ge=0.01, le=LONGEST_SECONDS, allow_inf_nan=False)] = Field(
        default=1.0,
        description="time between two signs of life to the scheduler; at most half of scheduler.worker_timeout_seconds",
    )
    drain_seconds: Seconds = Field(default=30.0, description="after SIGTERM: time for running sequences to end")

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
    """Some workers that are alike. Beside `count` and `autoscaler`, any setting of `[worker]` about its GPU, such as
    `gpu`, `gpus`, `tensor_parallel` or `weight_dtype`; what a group does not set is as `[worker]` says.
    """  # noqa: D205  the settings page shows it as one paragraph

    model_config = ConfigDict(extra="allow", frozen=True)

    count: Count = Field(default=1, description="how many worker processes; each hosts as many workers as gpus says")
    autoscaler: dict[str, Any] = Field(
        default={}, description="what [autoscaler] says otherwise of these; each group is scaled by a rule of its own"
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
