"""The flags that `lorrery serve` takes: vLLM's, llm-d-inference-sim's and the Dynamo mocker's that mean something.

One table makes the command line, its help and docs/serve.md. A flag either sets one setting as it is, or is read by
name in `settings.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Annotated, Any, TypeVar

import typer

_MODEL, _BATCHES, _KV, _LORA = "Model and GPU", "Batches", "KV cache", "Adapters"
_SERVER, _TIME, _AS_IT_IS = "Server", "Output, time and faults", "Accepted: it is so in any case"

_METAVARS = {str: "NAME", int: "N", float: "X", bool: None, list[str]: "NAME"}

NOTHING = "nothing: it is so in any case"
_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag, which may have several names.

    Attributes:
        names: as on the command line, this command's own first; `--a/--no-a` where it can be turned off.
        kind: of its value; `list[str]` takes several after one flag, as vLLM does.
        panel: of the help.
        help: one sentence.
        sets: the setting, or what `settings.py` makes of it in words.
        plain: whether the setting gets the value as it is.
        least: lowest value.
        metavar: of the value in the help.
        variable: environment variable that stands for it.
    """

    names: tuple[str, ...]
    kind: type[Any]
    panel: str
    help: str
    sets: str
    plain: bool = True
    least: float | None = None
    metavar: str | None = None
    variable: str | None = None

    @property
    def key(self) -> str:
        """Its name as a parameter."""
        return self.names[0].partition("/")[0].removeprefix("--").replace("-", "_")


def _flag(names: str, kind: type[Any], panel: str, sets: str, text: str, **more: Any) -> Flag:  # noqa: ANN401
    return Flag(tuple(names.split()), kind, panel, text, sets, **more)


FLAGS = (
    _flag(
        "--model --model-path",
        str,
        _MODEL,
        "model",
        "The same as MODEL: a model of the catalogue, also under its Hugging Face name.",
        plain=False,
        metavar="NAME",
    ),
    _flag("--gpu", str, _MODEL, "worker.gpu", "GPU, by its name in the catalogue; H100-SXM unless given."),
    _flag("--tensor-parallel-size -tp", int, _MODEL, "worker.tensor_parallel", "GPUs of one worker.", least=1),
    _flag(
        "--enable-expert-parallel/--no-enable-expert-parallel -ep",
        bool,
        _MODEL,
        "worker.expert_parallel",
        "Deal a mixture's experts to the GPUs instead of cutting each over all.",
    ),
    _flag(
        "--data-parallel-size -dp --num-workers",
        int,
        _MODEL,
        "lorrery up --workers",
        "Workers, all behind one port.",
        plain=False,
        least=1,
    ),
    _flag("--dtype", str, _MODEL, "worker.weight_dtype", "Format of the weights: auto, half, bfloat16.", plain=False),
    _flag(
        "--quantization -q",
        str,
        _MODEL,
        "worker.weight_dtype",
        "How the weights are quantized: fp8, awq, gptq, int8 and the like.",
        plain=False,
        metavar="METHOD",
    ),
    _flag(
        "--max-model-len",
        str,
        _MODEL,
        "scheduler.max_req_total_len, max_req_input_len",
        "Most tokens of a prompt and its output; 8192, or what the KV pool holds, unless given. 8k is 8,000, 8K 8,192.",
        plain=False,
        metavar="TOKENS",
    ),
    _flag("--tokenizer", str, _MODEL, "router.tokenizer", "A tokenizer.json, or a folder with one.", metavar="PATH"),
    _flag("--max-num-seqs", int, _BATCHES, "scheduler.max_num_seqs", "Most requests that run at once.", least=1),
    _flag(
        "--max-num-batched-tokens",
        int,
        _BATCHES,
        "scheduler.max_num_batched_tokens",
        "Most tokens that one step computes; 8192 unless given.",
        least=1,
    ),
    _flag(
        "--enable-chunked-prefill/--no-enable-chunked-prefill",
        bool,
        _BATCHES,
        "scheduler.batching: chunked or continuous",
        "Compute long prompts in pieces beside the decodes; on unless turned off.",
        plain=False,
    ),
    _flag(
        "--scheduling-policy",
        str,
        _BATCHES,
        "scheduler.policy",
        "fcfs, or a queue of Lorrery's: vtc_fair, req_queue and others of docs/policies.md.",
        metavar="NAME",
    ),
    _flag("--preemption-mode", str, _BATCHES, NOTHING, "lifo: the last to arrive is preempted.", plain=False),
    _flag(
        "--max-waiting-queue-length --max-num-queued-reqs",
        int,
        _BATCHES,
        "scheduler.max_waiting_requests",
        "Most requests that wait; the next gets a 429.",
        least=1,
    ),
    _flag(
        "--gpu-memory-utilization",
        float,
        _KV,
        "scheduler.max_total_token_num",
        "Share of the GPU's memory that weights, KV cache and activations may take; 0.9 unless given.",
        plain=False,
    ),
    _flag("--block-size", int, _KV, "scheduler.block_size", "Tokens in a KV block; 16 unless given.", least=1),
    _flag(
        "--num-gpu-blocks-override --kv-cache-size",
        int,
        _KV,
        "scheduler.max_total_token_num",
        "KV blocks, whatever the memory would hold.",
        plain=False,
        least=1,
    ),
    _flag(
        "--kv-cache-memory-bytes",
        str,
        _KV,
        "scheduler.max_total_token_num",
        "Bytes of KV cache on each GPU, such as 20G.",
        plain=False,
        metavar="BYTES",
    ),
    _flag("--kv-cache-dtype", str, _KV, "worker.kv_dtype", "auto, bfloat16, float16, or fp8.", plain=False),
    _flag(
        "--enable-prefix-caching/--no-enable-prefix-caching --enable-kvcache",
        bool,
        _KV,
        "scheduler.prefix_cache.kind: blocks or none",
        "Keep the blocks of prompts for others that begin alike; on unless turned off.",
        plain=False,
    ),
    _flag(
        "--zmq-endpoint",
        str,
        _KV,
        "worker.kv_events.endpoint",
        "Where KV events go, as vLLM publishes them: tcp://*:5557 is listened on, tcp://HOST:5557 connected to.",
        metavar="URL",
    ),
    _flag(
        "--kv-events-replay-endpoint",
        str,
        _KV,
        "worker.kv_events.replay_endpoint",
        "Where missed KV events are asked for again.",
        metavar="URL",
    ),
    _flag(
        "--kv-events-replay-queue-size",
        int,
        _KV,
        "worker.kv_events.buffer_steps",
        "Batches of KV events that can be asked for again.",
        least=1,
    ),
    _flag(
        "--use-vllm-map-event-format",
        bool,
        _KV,
        "worker.kv_events.format: map",
        "Write a KV event as a map, as vLLM does since 0.24.",
        plain=False,
    ),
    _flag(
        "--kv-events-config",
        str,
        _KV,
        "worker.kv_events",
        "vLLM's JSON: endpoint, replay_endpoint, buffer_steps, hwm, topic.",
        plain=False,
        metavar="JSON",
    ),
    _flag("--watermark", float, _KV, "scheduler.watermark", "Share of the blocks that admission leaves free."),
    _flag(
        "--lora-modules",
        list[str],
        _LORA,
        "adapters.registry",
        "Adapters, several after one flag: NAME=RANK, NAME=PATH with an adapter_config.json there, or vLLM's JSON.",
        plain=False,
        metavar="NAME=RANK|NAME=PATH",
    ),
    _flag("--max-loras", int, _LORA, "adapters.max_loras", "Adapters on the GPU at once; 1 unless given.", least=1),
    _flag(
        "--max-cpu-loras",
        int,
        _LORA,
        "adapters.max_cpu_loras",
        "Adapters in host memory, others load from disk; as many as --max-loras unless given.",
        least=1,
    ),
    _flag("--max-lora-rank", int, _LORA, "adapters.max_lora_rank", "Largest rank; 16 unless given.", least=1),
    _flag(
        "--lora-target-modules",
        list[str],
        _LORA,
        "adapters.target_modules",
        "Projections that adapters change; qkvo unless this or an adapter_config.json names one of the feed-forward's.",
        plain=False,
        metavar="NAME",
    ),
    _flag(
        "--fully-sharded-loras/--no-fully-sharded-loras",
        bool,
        _LORA,
        "worker.lora.sharded",
        "Cut both matrices of an adapter over the GPUs.",
    ),
    _flag("--host", str, _SERVER, "router.http", "Address to listen at; 127.0.0.1 unless given.", plain=False),
    _flag("--port", int, _SERVER, "router.http", "Port; 8000 unless given, 0 takes a free one.", plain=False, least=0),
    _flag(
        "--grpc-port",
        int,
        _SERVER,
        "router.listen",
        "Port of Lorrery's own gRPC; a free one unless given.",
        plain=False,
        least=0,
    ),
    _flag(
        "--served-model-name --model-name",
        list[str],
        _SERVER,
        "router.served_model_names",
        "Names that clients may give the base model, answers carry the first; MODEL as it is written unless given.",
        metavar="NAME",
    ),
    _flag(
        "--api-key",
        list[str],
        _SERVER,
        "router.keys",
        "Keys of which clients must show one; $VLLM_API_KEY too.",
        plain=False,
        metavar="KEY",
        variable="VLLM_API_KEY",
    ),
    _flag(
        "--ssl-certfile", str, _SERVER, "router.http_tls.cert", "PEM file of the server's certificate.", metavar="FILE"
    ),
    _flag("--ssl-keyfile", str, _SERVER, "router.http_tls.key", "PEM file of its private key.", metavar="FILE"),
    _flag(
        "--ssl-ca-certs",
        str,
        _SERVER,
        "router.http_tls.ca",
        "PEM file of authorities; clients must show a certificate that one of them signed.",
        metavar="FILE",
    ),
    _flag(
        "--uvicorn-log-level --log-level",
        str,
        _SERVER,
        "log.level",
        "Least severity that is logged; warning unless given.",
        plain=False,
        metavar="LEVEL",
    ),
    _flag(
        "--shutdown-timeout",
        float,
        _SERVER,
        "drain_seconds of router, worker and scheduler",
        "Seconds that running requests have to end after SIGTERM; 30 unless given.",
        plain=False,
        least=0,
    ),
    _flag(
        "--startup-duration --startup-time",
        str,
        _TIME,
        "worker.startup_seconds",
        "How long the weights load, such as 5 or 5s; /health says 503 until then.",
        plain=False,
        metavar="DURATION",
    ),
    _flag("--mode", str, _TIME, "worker.output.mode", "What answers say: random words, or echo, the prompt again."),
    _flag(
        "--seed",
        int,
        _TIME,
        "router.seed, scheduler.seed",
        "The same requests in the same order get the same answers, run after run.",
        plain=False,
        least=0,
    ),
    _flag(
        "--speedup-ratio",
        float,
        _TIME,
        "time_scale: 1 / ratio",
        "Everything takes so many times less time.",
        plain=False,
    ),
    _flag(
        "--time-to-first-token",
        str,
        _TIME,
        "worker.step_time: constant; worker.constant.prefill_ms",
        "A lone request's, in ms or as 100ms, in place of a GPU's time; needs --inter-token-latency.",
        plain=False,
        metavar="DURATION",
    ),
    _flag(
        "--inter-token-latency",
        str,
        _TIME,
        "worker.step_time: constant; worker.constant.step_ms",
        "Time of every step, in ms or as 20ms, in place of a GPU's.",
        plain=False,
        metavar="DURATION",
    ),
    _flag(
        "--prefill-overhead",
        str,
        _TIME,
        "worker.constant.prefill_ms",
        "Of each step with prompt tokens, beside --prefill-time-per-token; needs --inter-token-latency.",
        plain=False,
        metavar="DURATION",
    ),
    _flag(
        "--prefill-time-per-token",
        str,
        _TIME,
        "worker.constant.prefill_token_ms",
        "Of each prompt token that no cache holds; needs --inter-token-latency.",
        plain=False,
        metavar="DURATION",
    ),
    _flag(
        "--failure-injection-rate",
        float,
        _TIME,
        "faults: refuse",
        "Requests in a hundred that fail at once.",
        plain=False,
        least=0,
        metavar="PERCENT",
    ),
    _flag(
        "--failure-types",
        list[str],
        _TIME,
        "faults: refuse",
        "How they fail: rate_limit, invalid_api_key, context_length, server_error, invalid_request, model_not_found.",
        plain=False,
        metavar="NAME",
    ),
    _flag("--enable-lora", bool, _AS_IT_IS, NOTHING, "Adapters can be named and loaded.", plain=False),
    _flag("--disable-log-requests", bool, _AS_IT_IS, NOTHING, "Requests are not logged.", plain=False),
    _flag("--disable-log-stats", bool, _AS_IT_IS, NOTHING, "Figures are in the metrics.", plain=False),
    _flag("--disable-uvicorn-access-log", bool, _AS_IT_IS, NOTHING, "There is no access log.", plain=False),
    _flag("--enable-prompt-tokens-details", bool, _AS_IT_IS, NOTHING, "The usage has cached tokens.", plain=False),
    _flag("--trust-remote-code", bool, _AS_IT_IS, NOTHING, "No code of the model's is run.", plain=False),
    _flag("--engine-type", str, _AS_IT_IS, NOTHING, "vllm.", plain=False),
)
"""All of them, as the help and docs/serve.md show them."""


def takes_flags(command: _F) -> _F:
    """Give a function of `**given` the parameters that typer makes the flags of."""
    parameters = [
        Parameter(flag.key, Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(flag)) for flag in FLAGS
    ]
    own = [one for one in Signature.from_callable(command).parameters.values() if one.kind != Parameter.VAR_KEYWORD]
    signature = Signature([*own, *parameters])
    setattr(command, "__signature__", signature)  # noqa: B010  what inspect, and so typer, goes by
    return command


def _annotation(flag: Flag) -> Any:  # noqa: ANN401  what typer reads
    option = typer.Option(
        *flag.names,
        help=flag.help,
        metavar=flag.metavar or _METAVARS[flag.kind],
        rich_help_panel=flag.panel,
        min=flag.least,
        envvar=flag.variable,
        show_envvar=False,
        show_default=False,
    )
    return Annotated[flag.kind | None, option]
