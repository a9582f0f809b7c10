"""The settings of a router: the client side."""

from typing import Annotated, Literal

from pydantic import Field

from lorrery.service.settings.sections import (
    Address,
    AddressOrNone,
    Count,
    Interval,
    LoadLimit,
    PathOrNone,
    Seconds,
    Section,
    Seed,
    Target,
    TlsSettings,
)

Protocol = Literal["vllm", "smg-vllm", "sglang"]


class EnginePort(Section):
    """A port at which the router acts as an engine."""

    protocol: Protocol = Field(
        description="vllm: vLLM's own protocol (vllm.Inference, vllm.Control); smg-vllm: vllm.grpc.engine.VllmEngine;"
        " sglang: sglang.grpc.scheduler.SglangScheduler; the last two need the extra `engines`"
    )
    listen: Address = Field(description="where gateways connect, HOST:PORT; port 0 takes a free one")
    adapter: str = Field(
        default="",
        description="adapter to serve under its own name, for gateways without adapter support; empty: the base model"
        " and any adapter that a request names",
    )


class RouterSettings(Section):
    """The router: client-facing ports, limits and timeouts."""

    listen: Address = Field(
        default="127.0.0.1:50051", description="where clients connect, HOST:PORT; port 0 takes a free one"
    )
    http: AddressOrNone = Field(
        default="127.0.0.1:8000",
        description="where HTTP clients connect (OpenAI's and S-LoRA's routes), HOST:PORT; port 0 takes a free one;"
        " empty: no HTTP",
    )
    http_allowed_origins: tuple[str, ...] = Field(
        default=(),
        description="origins whose pages may call the HTTP routes from a browser (CORS), such as"
        " https://chat.example.org, or * for all; empty: none",
    )
    http_max_connections: Count = Field(
        default=10_000, description="maximum open HTTP connections; further ones are answered with 503 and closed"
    )
    http_request_seconds: Interval = Field(
        default=30.0, description="how long an HTTP client may take to send a request, including its body"
    )
    http_idle_seconds: Interval = Field(
        default=75.0,
        description="how long an idle HTTP connection stays open; keep it above the idle timeout of a proxy in front"
        " (60 in nginx), which could otherwise send a request on a connection that is closing",
    )
    http_max_outputs: Count = Field(
        default=1024, description="maximum outputs of one HTTP request, prompts times n; more are refused with 400"
    )
    tool_call_probability: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.0,
        description="probability, 0 to 1, with which an output over HTTP calls tools where the request offers some and"
        " leaves the choice to the model (tool_choice auto)",
    )
    tool_calls: Literal["none", "required", "auto"] = Field(
        default="auto",
        description="calls of tools that clients may ask for over HTTP: `none`; `required`, those that they name or"
        " require; `auto`, also those that they leave to the model",
    )
    exclude_tools_when_tool_choice_none: bool = Field(
        default=False, description="leave tools out of the prompt where tool_choice is none"
    )
    mock_adapters: bool = Field(
        default=True,
        description="whether a client may load an adapter by its rank, without a folder that has its weights",
    )
    vllm_quirks: bool = Field(
        default=False,
        description="whether odd behaviours of vLLM 0.32 are kept: loads of any peft_type, and"
        " vllm:lora_requests_info; engine = 'vllm-0.32' sets it",
    )
    vllm_grpc: AddressOrNone = Field(
        default=None,
        description="where gateways that speak vLLM's gRPC (vllm.Inference, vllm.Control) connect, HOST:PORT; port 0"
        " takes a free one; empty: not served",
    )
    smg_vllm_grpc: AddressOrNone = Field(
        default=None,
        description="like vllm_grpc, for vllm.grpc.engine.VllmEngine, which the gateway smg speaks; needs the extra"
        " `engines`",
    )
    sglang_grpc: AddressOrNone = Field(
        default=None, description="like vllm_grpc, for sglang.grpc.scheduler.SglangScheduler; needs the extra `engines`"
    )
    engines: tuple[EnginePort, ...] = Field(
        default=(), description="further ports with these protocols, each acting as a separate engine"
    )
    metrics: Address = Field(
        default="127.0.0.1:9101", description="where Prometheus reads metrics, HOST:PORT; port 0 takes a free one"
    )
    schedulers: Annotated[tuple[Target, ...], Field(min_length=1)] = Field(
        default=("127.0.0.1:50052",),
        description="schedulers over which requests are spread: HOST:PORT, or dns:///NAME:PORT for every address of a"
        " name; dns://SERVER:PORT/NAME:PORT uses that name server",
    )
    resolve_seconds: Interval = Field(default=5.0, description="how often scheduler names are resolved again")
    max_shard_load: LoadLimit = Field(
        default=1.15,
        description="a scheduler with more than this multiple of its share of requests, which is proportional to its"
        " workers, is passed over for the next one in the adapter's order; inf: no limit",
    )

    keys: PathOrNone = Field(
        default=None,
        description="TOML file of clients' API keys, reread when it changes; unset: no keys, every call is allowed",
    )
    model_root: str = Field(
        default="",
        description="`root` of the base model in /v1/models, by which clients find its tokenizer; empty: model",
    )
    served_model_names: tuple[str, ...] = Field(
        default=(),
        description="names by which clients may call the base model; responses carry the one asked for; unset: model",
    )
    vocab_size: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="tokens of the model's vocabulary: ids in requests must be below it; unset: those of the tokenizer,"
        " or with the shipped one 1,048,576",
    )
    seed: Seed | None = Field(
        default=None,
        description="seed from which requests without a seed get theirs, in order of arrival; unset: different at each"
        " start",
    )
    tokenizer: PathOrNone = Field(
        default=None,
        description="a tokenizer.json or the folder that contains it, read by routers and workers; unset: the shipped"
        " one",
    )
    max_open_requests: Count = Field(
        default=20_000, description="maximum open requests; further ones are refused with RESOURCE_EXHAUSTED"
    )
    max_stop_strings: Count = Field(
        default=64, description="maximum stop strings per request; more are refused with INVALID_ARGUMENT"
    )
    max_stop_bytes: Count = Field(
        default=4096,
        description="maximum total size of a request's stop strings in bytes (UTF-8); matching takes about 100 bytes"
        " of memory per byte while the stream is open",
    )
    max_pending_tokens: Count = Field(
        default=2048,
        description="maximum tokens, of 4 bytes each, buffered for one slow reader; beyond that its stream ends with"
        " RESOURCE_EXHAUSTED",
    )
    reader_timeout_seconds: Interval = Field(
        default=10.0, description="a stream whose reader takes nothing for this long ends with RESOURCE_EXHAUSTED"
    )
    max_flush_gap_seconds: Seconds = Field(
        default=0.08, description="longest time that tokens are held back under overload"
    )
    resume_timeout_seconds: Seconds = Field(
        default=60.0, description="how long a stream waits for a scheduler to come back before it ends with UNAVAILABLE"
    )
    request_faults: bool = Field(
        default=False, description="let requests inject faults into themselves with the metadata lorrery-fault"
    )
    drain_seconds: Seconds = Field(default=30.0, description="time for open streams to finish after SIGTERM")
    http_tls: TlsSettings = Field(
        default=TlsSettings(), description="TLS of the HTTP edge, where it differs from server_tls; unset: server_tls"
    )

    def engine_ports(self) -> dict[str, EnginePort]:
        """Return the ports that speak engine protocols, by their names in the start-up announcement."""
        shared: tuple[tuple[str, Protocol, str | None], ...] = (
            ("vllm_grpc", "vllm", self.vllm_grpc),
            ("smg_vllm_grpc", "smg-vllm", self.smg_vllm_grpc),
            ("sglang_grpc", "sglang", self.sglang_grpc),
        )
        ports = {name: EnginePort(protocol=protocol, listen=listen) for name, protocol, listen in shared if listen}
        return ports | {f"engines[{index}]": port for index, port in enumerate(self.engines)}
