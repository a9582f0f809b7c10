"""Recorded requests in what servers, gateways and benchmarks write beside: access logs and results of runs.

Access logs: an object for each request, with its time and its tokens; prompts are not read.

Tokens. `prompt_tokens` and `completion_tokens`, or `input_tokens` and `output_tokens`, in the object itself, in its
`usage` or in the `usage` of its `response` (with or without a `body`): as the answers of OpenAI's API have them, and
with them what vLLM, SGLang and LiteLLM log (`StandardLoggingPayload`, docs.litellm.ai/docs/proxy/logging_spec).

Time. The first of `_STAMPS` that the first entry has: a time from the start of a request before one that may be its
end. ISO 8601, or a number since an epoch, whose unit follows from its size. Entries with an `error`, a `status` of
failure or an HTTP status of 400 or more have failed, and are left out.

aiperf: github.com/ai-dynamo/aiperf, `profile_export.jsonl`: `metadata.request_start_ns`,
`metrics.input_sequence_length` and `output_sequence_length`, a number or `{"value": n}`. Records of a warm-up
(`metadata.benchmark_phase`), cancelled ones and those with an `error` are left out.

Benchmarks: the result of vLLM's `vllm bench serve --save-result --save-detailed` and of SGLang's `bench_serving
--output-details`: one object with the lists `input_lens`, `output_lens`, `errors`, and in newer versions of vLLM
`start_times` (seconds). Without these all requests come at once if `request_rate` is `inf`; otherwise gaps are drawn at
that rate, as the benchmark drew them.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from lorrery.loadgen.workload.recorded import RecordedRows
from lorrery.loadgen.workload.request import TraceError
from lorrery.loadgen.workload.trace_formats import JsonForm, nanoseconds_of, time_of, tokens_of

_STAMPS: Final = (
    *("startTime", "start_time", "request_time", "started_at", "arrival_time", "timestamp", "@timestamp", "time", "ts"),
    *("created_at", "created"),
)
"""Names of a request's time."""
_TOKENS: Final = (("prompt_tokens", "completion_tokens"), ("input_tokens", "output_tokens"))
_FAILURES: Final = frozenset({"failure", "failed", "error", "cancelled", "canceled"})
_NS: Final = 1e9
_UNITS: Final = ((1e17, 1.0), (1e14, 1e3), (1e11, 1e6))
"""Least number of an epoch's time in nanoseconds, microseconds, milliseconds, all in 1973, and its unit in ns."""


def _usage(row: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[str, str]] | None:
    """Return what has a request's tokens, and their names; None: nothing has."""
    response = row.get("response")
    if isinstance(response, Mapping) and isinstance(body := response.get("body"), Mapping):
        response = body
    for holder in (row, row.get("usage"), response.get("usage") if isinstance(response, Mapping) else None):
        if isinstance(holder, Mapping):
            for names in _TOKENS:
                if names[0] in holder:
                    return holder, names
    return None


def _is_access_log(row: Mapping[str, Any]) -> bool:
    return _usage(row) is not None and any(name in row for name in _STAMPS)


def _stamp(where: str, name: str, value: object) -> float:
    """Return a time as nanoseconds of an epoch."""
    if isinstance(value, str):
        return float(nanoseconds_of(where, name, value))
    number = time_of(where, {name: value}, name)
    return number * next((unit for least, unit in _UNITS if number >= least), _NS)


def _failed(row: Mapping[str, Any]) -> bool:
    status = row.get("status", row.get("status_code"))
    if isinstance(status, str):
        return status.lower() in _FAILURES or (status.isdecimal() and int(status) >= 400)
    return bool(row.get("error")) or (isinstance(status, int) and status >= 400)


def _add_access(rows: RecordedRows, where: str, row: Mapping[str, Any]) -> None:
    if _failed(row):
        rows.num_failed += 1
        return
    name = next((name for name in _STAMPS if name in row), None)
    if name is None:
        raise TraceError(f"{where}: no time; a request's is one of {', '.join(_STAMPS)}")
    found = _usage(row)
    if found is None:
        raise TraceError(f"{where}: no prompt_tokens or input_tokens, neither in the entry nor in its usage")
    holder, (prompt, output) = found
    rows.add(where, _stamp(where, name, row[name]), tokens_of(where, holder, prompt), tokens_of(where, holder, output))
    rows.remark(f"times are those of {name!r}")


def _add_aiperf(rows: RecordedRows, where: str, row: Mapping[str, Any]) -> None:
    told, metrics = (_object(where, row, name) for name in ("metadata", "metrics"))
    if told.get("benchmark_phase", "profiling") != "profiling":
        return
    if row.get("error") or told.get("was_cancelled"):
        rows.num_failed += 1
        return
    lengths = {
        name: value["value"] if isinstance(value := metrics.get(name), Mapping) and "value" in value else value
        for name in ("input_sequence_length", "output_sequence_length")
        if name in metrics
    }
    prompt, output = (tokens_of(where, lengths, f"{side}_sequence_length") for side in ("input", "output"))
    rows.add(where, time_of(where, told, "request_start_ns"), prompt, output)


def _add_benchmark(rows: RecordedRows, where: str, row: Mapping[str, Any]) -> None:
    prompts, outputs = (_list(where, row, name) for name in ("input_lens", "output_lens"))
    errors = row.get("errors") or [""] * len(prompts)
    starts = row.get("start_times")
    if starts is None:
        starts = _drawn(rows, row.get("request_rate"), len(prompts))
    for name, values in (("output_lens", outputs), ("errors", errors), ("start_times", starts)):
        if not isinstance(values, list) or len(values) != len(prompts):
            raise TraceError(f"{where}: {name} must be a list of {len(prompts)}, as input_lens is")
    for number, (at, prompt, output, error) in enumerate(zip(starts, prompts, outputs, errors, strict=True)):
        if rows.is_full:
            break
        if error or not output:
            rows.num_failed += 1
            continue
        one, place = {"start_times": at, "input_lens": prompt, "output_lens": output}, f"{where}, request {number}"
        lengths = (tokens_of(place, one, name) for name in ("input_lens", "output_lens"))
        rows.add(place, time_of(place, one, "start_times"), *lengths)


def _drawn(rows: RecordedRows, rate: object, num_requests: int) -> list[float]:
    """Return times for a result without any."""
    try:
        number = float(rate)  # type: ignore[arg-type]  # as just tried
    except (TypeError, ValueError):
        number = math.inf
    if not 0 < number < math.inf:
        rows.remark("no start_times are in it, nor a request_rate: all requests come at once")
        return [0.0] * num_requests
    rows.remark(f"no start_times are in it: gaps are drawn at its request_rate of {number:g}")
    gaps: list[float] = np.random.default_rng(0).exponential(1 / number, num_requests).cumsum().tolist()
    return gaps


def _object(where: str, row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    if not isinstance(value := row.get(name), Mapping):
        raise TraceError(f"{where}: {name} is {str(value)[:40]!r}; expected an object")
    return value


def _list(where: str, row: Mapping[str, Any], name: str) -> Sequence[Any]:
    if not isinstance(value := row.get(name), list):
        raise TraceError(f"{where}: {name} is {str(value)[:40]!r}; expected a list")
    return value


LOG_FORMS: Final = (
    JsonForm("aiperf's records", "metrics", _NS, _add_aiperf),
    JsonForm("a benchmark's result", "input_lens", 1.0, _add_benchmark),
    JsonForm("an access log", "usage", _NS, _add_access, fits=_is_access_log),
)
