"""The settings of a router: the client side."""

from typing import Annotated, Literal

from pydantic import Field

from lorrery.chassis.sections import (
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
    """A port at which the router is an engine."""

    protocol: Protocol = Field(
        description="vllm: vLLM's own (vllm.Inference, vllm.Control); smg-vllm: vllm.grpc.engine.VllmEngine;"
        " sglang: sglang.grpc.scheduler.SglangScheduler; the last two need the extra `engines`"
    )
    listen: Address = Field(description="where gateways connect, HOST:PORT; port 0 takes a free one")
    adapter: str = Field(
        default="",
        description="the adapter that it serves under its own name, for gateways that know none; empty: the base model,"
        " and every adapter that a request names",
    )


class RouterSettings(Section):
    """The client side."""

    listen: Address = Field(
        default="127.0.0.1:50051", description="where clients connect, HOST:PORT; port 0 takes a free one"
    )
    http: AddressOrNone = Field(
        default="127.0.0.1:8000",
        description="where HTTP clients connect (OpenAI's and S-LoRA's routes), HOST:PORT; port 0 takes a free one;"
        " empty: nowhere",
    )
    http_allowed_origins: tuple[str, ...] = Field(
        default=(),
        description="pages of which sites may call HTTP routes from a browser (CORS): origins such as"
        " https://chat.example.org, or * for all; empty: none",
    )
    http_max_connections: Count = Field(
        default=10_000, description="most HTTP connections at once; more are answered with 503 and closed"
    )
    http_request_seconds: Interval = Field(
        default=30.0, description="how long an HTTP client may take to send a request, its body included"
    )
    http_idle_seconds: Interval = Field(
        default=75.0,
        description="how long an HTTP connection stays open without a request; above that of a proxy before it (60 in"
        " nginx), which else may send a request while it closes",
    )
    http_max_outputs: Count = Field(
        default=1024, description="most outputs of one HTTP request: its prompts times n; more are refused with 400"
    )
    vllm_grpc: AddressOrNone = Field(
        default=None,
        description="where gateways that speak vLLM's gRPC (vllm.Inference, vllm.Control) connect, HOST:PORT; port 0"
        " takes a free one; empty: nowhere",
    )
    smg_vllm_grpc: AddressOrNone = Field(
        default=None,
        description="the same for vllm.grpc.engine.VllmEngine, as the gateway smg speaks it; needs the extra `engines`",
    )
    sglang_grpc: AddressOrNone = Field(
        default=None,
        description="the same for sglang.grpc.scheduler.SglangScheduler; needs the extra `engines`",
    )
    engines: tuple[EnginePort, ...] = Field(
        default=(), description="further ports of these protocols, each of an engine of its own"
    )
    metrics: Address = Field(
        default="127.0.0.1:9101", description="where Prometheus reads metrics, HOST:PORT; port 0 takes a free one"
    )
    schedulers: Annotated[tuple[Target, ...], Field(min_length=1)] = Field(
        default=("127.0.0.1:50052",),
        description="schedulers to spread requests over: HOST:PORT, or dns:///NAME:PORT for every address that a name"
        " has; dns://SERVER:PORT/NAME:PORT asks that name server",
    )
    resolve_seconds: Interval = Field(
        default=5.0, description="how often names of schedulers are asked for their addresses again"
    )
    max_shard_load: LoadLimit = Field(
        default=1.15,
        description="a scheduler that has more requests than so many times its share, by its workers, is passed over"
        " for the next in the order of the adapter; inf: none is",
    )

    keys: PathOrNone = Field(
        default=None,
        description="TOML file of clients' API keys, read again when it changes; unset: everybody may do everything",
    )
    served_model_names: tuple[str, ...] = Field(
        default=(),
        description="names that clients may give the base model, answers carry the first; unset: model",
    )
    seed: Seed | None = Field(
        default=None,
        description="of the seeds that requests without one get, in the order in which they come; unset: another each"
        " time the router starts",
    )
    tokenizer: PathOrNone = Field(
        default=None,
        description="a tokenizer.json, or the folder that holds one; routers and workers read it; unset: the shipped"
        " one",
    )
    max_open_requests: Count = Field(
        default=20_000, description="most requests at once; the next is refused with RESOURCE_EXHAUSTED"
    )
    max_stop_strings: Count = Field(
        default=64, description="most stop strings of a request; more are refused with INVALID_ARGUMENT"
    )
    max_stop_bytes: Count = Field(
        default=4096,
        description="most bytes (UTF-8) of a request's stop strings together; to look for them takes about 100 bytes of"
        " memory each while the stream is open",
    )
    max_pending_tokens: Count = Field(
        default=2048,
        description="tokens, of 4 bytes each, that may wait for one slow reader; with more its stream ends with"
        " RESOURCE_EXHAUSTED",
    )
    reader_timeout_seconds: Interval = Field(
        default=10.0, description="a stream whose reader takes nothing for so long ends with RESOURCE_EXHAUSTED"
    )
    max_flush_gap_seconds: Seconds = Field(default=0.08, description="longest time tokens are held back under overload")
    resume_timeout_seconds: Seconds = Field(
        default=60.0, description="how long a stream waits for a scheduler to come back before it ends with UNAVAILABLE"
    )
    request_faults: bool = Field(
        default=False, description="requests may ask for faults of their own in the metadata lorrery-fault"
    )
    drain_seconds: Seconds = Field(default=30.0, description="after SIGTERM: time for open streams to end")
    http_tls: TlsSettings = Field(
        default=TlsSettings(), description="of the HTTP edge, if it is another than server_tls; unset: server_tls"
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
