"""Reads what load generators print and save: runs of a real engine, as `posted` compares them.

Text that was pasted, with any number of result blocks of vLLM's or SGLang's benchmark (the two look alike), and the
commands of server and client where they are in it; JSON of `vllm bench serve --save-result`, of SGLang's
`bench_serving` (a line for each run), of aiperf (`profile_export_aiperf.json`) and of guidellm (`benchmarks.json`).
What a result does not say is the caller's to say: the engine, the model, the GPU.
"""

import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lorrery.service.errors import FormatError
from lorrery.validation.posted import PostedRow
from lorrery.validation.serving_rows import OK

_TITLE: Final = "Serving Benchmark Result"
_MOST_BYTES = 64 * 1024 * 1024

Lengths = tuple[str, float, int]


@dataclass(frozen=True, slots=True)
class Asked:
    """What the caller says of all runs.

    Attributes:
        engine: `vllm`, `sglang` or `trtllm`, with a version after a hyphen; empty: as the results say, else vLLM.
        flags: settings; they take precedence over the commands in the text.
    """

    engine: str
    flags: Mapping[str, Any]


def read_benchmarks(path: Path, asked: Asked) -> list[PostedRow]:
    """Read a file of benchmark results.

    Raises:
        FormatError: the file cannot be read, has no result, or one without its load or its times.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise FormatError(f"{path}: over {_MOST_BYTES // 1024**2} MiB; save results without the single requests")
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror}") from None
    found = list(_results(text))
    if not found:
        raise FormatError(
            f"{path}: no result of a benchmark: neither a block {_TITLE!r}, nor JSON of vllm bench serve, SGLang's"
            " bench_serving, aiperf or guidellm"
        )
    return [_row(number, result, asked, path) for number, result in enumerate(found, 1)]


def holds_benchmarks(path: Path) -> bool:
    """Return whether a file holds benchmark results rather than a table, to judge by its beginning."""
    with path.open("rb") as file:
        head = file.read(65_536)
    return head.lstrip()[:1] in (b"{", b"[") or _TITLE.encode() in head or b"vllm bench" in head


@dataclass(slots=True)
class _Result:
    """One run.

    Attributes:
        figures: by the names of `_FIGURES`.
        engine: without a version; empty: unknown.
        prompts: distribution, mean, most.
        outputs: likewise.
        server: words of the server's command.
    """

    figures: dict[str, float]
    engine: str = ""
    prompts: Lengths = ("fixed", 0.0, 0)
    outputs: Lengths = ("fixed", 0.0, 0)
    server: Sequence[str] = ()


_NEEDED: Final = ("requests", "prompt_tokens", "output_tokens")
_MEASURED: Final = ("out_tps", "ttft", "tpot", "e2e")


def _row(number: int, result: _Result, asked: Asked, path: Path) -> PostedRow:
    figures = result.figures
    if missing := [name for name in _NEEDED if not figures.get(name, 0) > 0]:
        raise FormatError(f"{path}: result {number} does not say its {', '.join(missing)}")
    measured = {name: figures[name] for name in _MEASURED if figures.get(name, 0) > 0}
    if not measured:
        raise FormatError(f"{path}: result {number} has no token rate, TTFT, TPOT or E2E")
    requests = round(figures["requests"])
    engine, _, version = (asked.engine or result.engine or "vllm").partition("-")
    rate, clients = figures.get("rate", 0.0), figures.get("clients", 0.0)
    return PostedRow(
        line=number,
        cells={},
        quality=OK,
        fitted=True,
        pair="",
        engine=engine,
        version=version,
        num_requests=requests,
        clients=round(clients) if 0 < clients < requests and not 0 < rate < float("inf") else None,
        rate=rate if 0 < rate < float("inf") else None,
        lengths=(
            _scaled(result.prompts, figures["prompt_tokens"] / requests),
            _scaled(result.outputs, figures["output_tokens"] / requests),
        ),
        trace=None,
        adapters=0,
        flags={**_of_server(result.server), **asked.flags},
        measured=measured,
    )


def _scaled(lengths: Lengths, mean: float) -> Lengths:
    """Return lengths with the mean that was counted; of uniform ones the largest is at least that."""
    distribution, _, most = lengths
    return distribution, max(mean, 1.0), max(most, round(mean)) if distribution == "uniform" else most


def _results(text: str) -> Iterator[_Result]:
    stripped = text.lstrip()
    if stripped[:1] in ("{", "["):
        for content in _json(stripped):
            yield from _of_json(content)
    else:
        yield from _of_text(text)


# --- text -------------------------------------------------------------------------------------------------------------

_FIGURES: Final[Mapping[str, str]] = {
    "Successful requests": "requests",
    "Maximum request concurrency": "clients",
    "Max request concurrency": "clients",
    "Request rate configured (RPS)": "rate",
    "Traffic request rate": "rate",
    "Total input tokens": "prompt_tokens",
    "Total generated tokens": "output_tokens",
    "Output token throughput (tok/s)": "out_tps",
    "Mean TTFT (ms)": "ttft",
    "Mean TPOT (ms)": "tpot",
    "Mean E2EL (ms)": "e2e",
    "Mean E2E Latency (ms)": "e2e",
}
"""Label of a line of a block -> figure."""
_LINE = re.compile(r"^\W*([A-Z][^:|]*?)\s*[:|]\s*(\S+)\s*\|?\s*$")
_SERVERS = ("vllm serve", "sglang.launch_server", "sglang serve", "trtllm-serve", "vllm.entrypoints.openai.api_server")
_CLIENTS = ("vllm bench serve", "bench_serving", "benchmark_serving")


def _of_text(text: str) -> Iterator[_Result]:
    """Yield the result of each block, with the commands last seen before it."""
    block: _Block | None = None
    commands = _Commands()
    before: dict[str, float] = {}  # load that a client prints before its block
    for line in [*text.replace("\\\n", " ").splitlines(), _TITLE]:
        if _TITLE in line:
            if block is not None:
                yield _text_result(block)
            block, before = _Block(before, commands), {}
        elif block is not None and line.strip() and not line.strip("= "):
            block.is_over = True
        elif any(name in line for name in _SERVERS):
            commands = _Commands(_words(line), commands.client)
        elif any(name in line for name in _CLIENTS):
            commands = _Commands(commands.server, _words(line))
        elif (found := _LINE.match(line)) is not None:
            label, value = found.groups()
            if label == "Backend" and block is not None:
                block.engine = "sglang" if value.startswith("sglang") else "vllm" if value.startswith("vllm") else ""
            elif (name := _FIGURES.get(label)) is not None and (number := _number(value)) is not None:
                (before if block is None or block.is_over else block.figures).setdefault(name, number)


@dataclass(frozen=True, slots=True)
class _Commands:
    """Words of the commands of server and client."""

    server: Sequence[str] = ()
    client: Sequence[str] = ()


@dataclass(slots=True)
class _Block:
    """A block, with what came before it; the line that ends it may be missing."""

    figures: dict[str, float]
    commands: _Commands
    engine: str = ""
    is_over: bool = False


def _text_result(block: _Block) -> _Result:
    figures, server = block.figures, block.commands.server
    options = _options(block.commands.client)
    for option, name in (("--max-concurrency", "clients"), ("--request-rate", "rate")):
        if option in options and (number := _number(options[option])) is not None:
            figures.setdefault(name, number)
    engine = block.engine or next(
        (name for name in ("sglang", "trtllm", "vllm") if any(name in one for one in server)), ""
    )
    dataset = options.get("--dataset-name", "")
    result = _Result(figures, engine, server=server)
    if dataset == "sharegpt":
        result.prompts, result.outputs = ("sharegpt_in", 0.0, 0), ("sharegpt_out", 0.0, 0)
    elif (ratio := _number(options.get("--random-range-ratio", ""))) is not None:
        longest = [_number(options.get(f"--random-{side}-len", "")) for side in ("input", "output")]
        result.prompts, result.outputs = (_drawn(most, ratio, engine) for most in longest)
    return result


def _drawn(longest: float | None, ratio: float, engine: str) -> Lengths:
    """Return random lengths: SGLang's are from `ratio` times the length to it, vLLM's that share below and above it."""
    if longest is None:
        return "fixed", 0.0, 0
    if engine == "sglang":
        return ("fixed", longest, 0) if ratio == 1 else ("uniform", longest * (1 + ratio) / 2, round(longest))
    return ("fixed", longest, 0) if ratio == 0 else ("uniform", longest, round(longest * (1 + ratio)))


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=False)
    except ValueError:
        return line.split()


def _options(words: Iterable[str]) -> dict[str, str]:
    """Return a command's options and what follows them, `--name value` or `--name=value`."""
    found: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("-") and _number(word) is None:
            name, _, value = word.partition("=")
            found[name] = value
        elif name:
            found[name] = found[name] or word
            name = ""
    return found


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


_WEIGHTS: Final = {
    "fp8": "fp8", "awq": "int4", "awq_marlin": "int4", "gptq": "int4", "gptq_marlin": "int4", "modelopt": "fp8",
    "modelopt_fp4": "nvfp4", "mxfp4": "mxfp4",
}  # fmt: skip
_SETS: Final[Mapping[str, tuple[str, Callable[[str], Any]]]] = {
    "-tp": ("worker.tensor_parallel", int),
    "--tp": ("worker.tensor_parallel", int),
    "--tp-size": ("worker.tensor_parallel", int),
    "--tp_size": ("worker.tensor_parallel", int),
    "--tensor-parallel-size": ("worker.tensor_parallel", int),
    "--max-num-seqs": ("scheduler.max_num_seqs", int),
    "--max-running-requests": ("scheduler.max_num_seqs", int),
    "--max_batch_size": ("scheduler.max_num_seqs", int),
    "--max-num-batched-tokens": ("scheduler.max_num_batched_tokens", int),
    "--chunked-prefill-size": ("scheduler.max_num_batched_tokens", int),
    "--max_num_tokens": ("scheduler.max_num_batched_tokens", int),
    "--gpu-memory-utilization": ("worker.gpu_memory_utilization", float),
    "--api-server-count": ("worker.api_server_count", int),
    "--kv-cache-dtype": ("worker.kv_dtype", lambda value: "fp8" if value.startswith("fp8") else "bfloat16"),
    "--quantization": ("worker.weight_dtype", lambda value: _WEIGHTS.get(value, "bfloat16")),
    "-q": ("worker.weight_dtype", lambda value: _WEIGHTS.get(value, "bfloat16")),
    "--enforce-eager": ("worker.enforce_eager", lambda _: True),
    "--disable-cuda-graph": ("worker.enforce_eager", lambda _: True),
    "--no-enable-prefix-caching": ("scheduler.prefix_cache.kind", lambda _: "none"),
    "--disable-radix-cache": ("scheduler.prefix_cache.kind", lambda _: "none"),
    "--model": ("model", str),
    "--model-path": ("model", str),
}
"""Option of a server's command -> the setting, and how to read its value."""


def _of_server(words: Sequence[str]) -> dict[str, Any]:
    """Return what a server's command sets; options that change nothing here are passed over."""
    flags: dict[str, Any] = {}
    for option, value in _options(words).items():
        if option in _SETS:
            name, read = _SETS[option]
            try:
                flags[name] = read(value)
            except ValueError:
                continue
    for index, word in enumerate(words[:-1]):
        if word in ("serve", "trtllm-serve") and not words[index + 1].startswith("-") and words[index + 1] != "serve":
            flags.setdefault("model", words[index + 1])
    return flags


# --- JSON -------------------------------------------------------------------------------------------------------------


def _json(text: str) -> Iterator[Any]:
    """Yield a document, or those on the lines of a text."""
    try:
        yield json.loads(text)
        return
    except (ValueError, RecursionError):
        pass
    for line in text.splitlines():
        try:
            yield json.loads(line)
        except (ValueError, RecursionError):
            continue


def _of_json(content: Any) -> Iterator[_Result]:  # noqa: ANN401  whatever JSON holds
    if isinstance(content, list):
        for one in content:
            yield from _of_json(one)
    elif isinstance(content, dict):
        if isinstance(content.get("benchmarks"), list):
            yield from (_of_guidellm(one) for one in content["benchmarks"] if isinstance(one, dict))
        elif isinstance(content.get("request_latency"), dict):
            yield _of_aiperf(content)
        elif "output_throughput" in content and "completed" in content:
            yield _of_engine(content)


def _at(content: Any, *keys: str) -> float:  # noqa: ANN401
    """Return a number that lies that deep; 0 if it is not there."""
    for key in keys:
        content = content.get(key) if isinstance(content, dict) else None
    return float(content) if isinstance(content, int | float) and not isinstance(content, bool) else 0.0


def _of_engine(content: Mapping[str, Any]) -> _Result:
    """Read a result of vLLM's or SGLang's own benchmark."""
    backend = str(content.get("backend") or content.get("endpoint_type") or "")
    engine = "sglang" if backend.startswith("sglang") or "random_range_ratio" in content else "vllm"
    figures = {
        "requests": _at(content, "completed"),
        "clients": _at(content, "max_concurrency"),
        "rate": _at(content, "request_rate"),
        "prompt_tokens": _at(content, "total_input_tokens"),
        "output_tokens": _at(content, "total_output_tokens"),
        "out_tps": _at(content, "output_throughput"),
        "ttft": _at(content, "mean_ttft_ms"),
        "tpot": _at(content, "mean_tpot_ms"),
        "e2e": _at(content, "mean_e2el_ms") or _at(content, "mean_e2e_latency_ms"),
    }
    result = _Result(figures, engine)
    ratio = content.get("random_range_ratio")
    if content.get("dataset_name") == "sharegpt":
        result.prompts, result.outputs = ("sharegpt_in", 0.0, 0), ("sharegpt_out", 0.0, 0)
    elif isinstance(ratio, int | float):
        longest = [_at(content, f"random_{side}_len") or None for side in ("input", "output")]
        result.prompts, result.outputs = (_drawn(most, float(ratio), engine) for most in longest)
    return result


def _of_aiperf(content: Mapping[str, Any]) -> _Result:
    config = content.get("input_config")
    config = config if isinstance(config, dict) else {}
    phases = [phase for phase in config.get("phases", ()) if isinstance(phase, dict) and phase.get("kind") != "warmup"]
    load = phases[-1] if phases else config.get("loadgen", {})
    requests = _at(content, "request_count", "avg")
    return _Result(
        {
            "requests": requests,
            "clients": _at(load, "concurrency"),
            "rate": _at(load, "rate") or _at(load, "request_rate"),
            "prompt_tokens": requests * _at(content, "input_sequence_length", "avg"),
            "output_tokens": requests * _at(content, "output_sequence_length", "avg"),
            "out_tps": _at(content, "output_token_throughput", "avg"),
            "ttft": _at(content, "time_to_first_token", "avg"),
            "tpot": _at(content, "inter_token_latency", "avg"),
            "e2e": _at(content, "request_latency", "avg"),
        }
    )


def _of_guidellm(content: Mapping[str, Any]) -> _Result:
    metrics = content.get("metrics", {})

    def mean(name: str) -> float:
        return _at(metrics, name, "successful", "mean")

    requests = _at(metrics, "request_totals", "successful") or _at(content, "request_totals", "successful")
    strategy = next(
        (
            found
            for where in ("config", "args", "scheduler")
            if isinstance(one := content.get(where), dict) and isinstance(found := one.get("strategy"), dict)
        ),
        {},
    )
    kind = str(strategy.get("type_", ""))
    clients = 1.0 if kind == "synchronous" else _at(strategy, "streams") if kind == "concurrent" else 0.0
    return _Result(
        {
            "requests": requests,
            "clients": clients,
            "rate": _at(strategy, "rate") if kind in ("constant", "async", "poisson") else 0.0,
            "prompt_tokens": requests * mean("prompt_token_count"),
            "output_tokens": requests * mean("output_token_count"),
            "out_tps": mean("output_tokens_per_second"),
            "ttft": mean("time_to_first_token_ms"),
            "tpot": mean("inter_token_latency_ms"),
            "e2e": mean("request_latency") * 1000,
        }
    )
