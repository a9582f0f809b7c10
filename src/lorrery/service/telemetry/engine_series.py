"""The series of other engines under their own names, so that tools for those engines can read our metrics.

Names, types, labels and buckets are those of vLLM 0.32 (and of 0.9 to 0.28 where an older name is still in use), of the
residency series that vLLM is about to add (pull request 54830), of llm-d-inference-sim, and of SGLang 0.5.
`docs/gateways.md` says what each means here, and which stay at 0.
"""

from lorrery.service.telemetry.series import Series

ENGINE = ("model_name", "engine")
"""Labels of vLLM's series; a process has one engine, 0."""

_PHASE = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0),
)
_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
_GAP = (*(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),)
_ITERATION = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
_LOAD = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

CACHE_CONFIG = {
    "_block_size_resolved": "True",
    "block_size": "",
    "cache_dtype": "",
    "cache_hit_alignment_tokens": "None",
    "effective_attention_block_size": "",
    "enable_mamba_shared_prefix_checkpoint": "False",
    "enable_prefix_caching": "",
    "engine": "",
    "gpu_memory_utilization": "",
    "hash_block_size": "None",
    "is_attention_free": "False",
    "kv_cache_dtype_skip_layers": "[]",
    "kv_cache_layout": "None",
    "kv_cache_max_concurrency": "",
    "kv_cache_memory_bytes": "None",
    "kv_cache_size_tokens": "",
    "kv_offloading_backend": "native",
    "kv_offloading_size": "None",
    "kv_sharing_fast_prefill": "False",
    "mamba_block_size": "None",
    "mamba_cache_dtype": "auto",
    "mamba_cache_mode": "none",
    "mamba_page_size_padded": "None",
    "mamba_ssm_cache_dtype": "auto",
    "num_cpu_blocks": "None",
    "num_gpu_blocks": "",
    "num_gpu_blocks_override": "None",
    "prefix_cache_retention_interval": "0",
    "prefix_caching_hash_algo": "sha256",
    "prefix_match_unit": "None",
    "replayssm_buffer_len": "16",
    "skip_page_size_padded": "None",
    "sliding_window": "None",
    "swa_bounded_replay": "True",
    "use_kda_recoverssm": "False",
    "use_replayssm": "False",
    "user_specified_block_size": "True",
}
"""Labels of `cache_config_info` with vLLM's defaults; an empty one is of the engine. The mock has no Mamba layers, no
sliding window and no offloading."""

FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")


PARSE_MODES = ("streaming", "non_streaming")
PARSE_OUTCOMES = ("tool_call", "no_tool_call")
PARSED_REQUESTS = ("chat_completions", "responses", "other")
TOOL_PARSES = Series(
    "vllm:tool_call_parser_invocations_total",
    "readings",
    "Readings of output for calls of tools that it may have: one per message of a stream, else one per output.",
    ("model_name", "mode", "outcome", "request_type"),
)
"""Only at an edge, and there only if clients may leave the choice of tools to the model, as in vLLM."""


def counts_up_to(longest: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50 and so on, up to `longest`."""
    buckets: list[float] = []
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power > longest:
                return tuple(buckets) or (1.0,)
            buckets.append(float(digit * power))
        power *= 10


def _series(name: str, unit: str, text: str, *labels: str, buckets: tuple[float, ...] = ()) -> Series:
    return Series(f"vllm:{name}", unit, text, (*ENGINE, *labels), buckets)


def vllm_series(max_model_len: int) -> dict[str, Series]:
    """Return vLLM's series by name, without the prefix.

    Args:
        max_model_len: upper bound on prompt plus output; determines the last bucket of lengths.
    """
    lengths = counts_up_to(max_model_len)
    listed = (
        _series("num_requests_running", "requests", "Requests in the batch."),
        _series("num_requests_waiting", "requests", "Requests that wait for admission."),
        _series(
            "num_requests_waiting_by_reason",
            "requests",
            "Waiting requests, by reason: capacity, or deferred until their adapter is loaded.",
            "reason",
        ),
        _series(
            "engine_sleep_state",
            "1 or 0",
            "1 for the engine's current state, which is always awake.",
            "sleep_state",
        ),
        _series("kv_cache_usage_perc", "1", "Share of the KV pool in use; 1 is all of it."),
        _series("gpu_cache_usage_perc", "1", "The same under the name that vLLM had until 0.9."),
        _series("num_preemptions_total", "preemptions", "Sequences preempted from the batch."),
        _series("prompt_tokens_total", "tokens", "Prompts that have been prefilled, cached tokens included."),
        _series(
            "prompt_tokens_by_source_total",
            "tokens",
            "Prompts that have been prefilled, by where the tokens came from.",
            "source",
        ),
        _series("prompt_tokens_cached_total", "tokens", "Of these, tokens that a prefix cache had."),
        _series(
            "prompt_tokens_cached_by_source_total",
            "tokens",
            "Tokens found in the prefix cache at admission, by the tier that had them.",
            "source",
        ),
        _series("generation_tokens_total", "tokens", "Tokens generated."),
        _series("request_success_total", "requests", "Requests that ended, by reason.", "finished_reason"),
        _series("prefix_cache_queries_total", "tokens", "Tokens looked up in the prefix cache."),
        _series("prefix_cache_hits_total", "tokens", "Tokens found in the prefix cache."),
        _series("external_prefix_cache_queries_total", "tokens", "Tokens looked up in an external cache; always 0."),
        _series("external_prefix_cache_hits_total", "tokens", "Tokens found in an external cache; always 0."),
        _series("corrupted_requests_total", "requests", "Requests with NaN in their logits; always 0."),
        Series(
            "vllm:admission_rejections_total",
            "requests",
            "Requests refused because a queue was full.",
            ("model_name", "reason"),
        ),
        _series("time_to_first_token_seconds", "device seconds", "From arrival to first token.", buckets=_TTFT),
        _series("inter_token_latency_seconds", "device seconds", "Gap between two tokens of a request.", buckets=_GAP),
        _series(
            "time_per_output_token_seconds",
            "device seconds",
            "The same under the name that vLLM had until 0.11.",
            buckets=_GAP,
        ),
        _series(
            "request_time_per_output_token_seconds",
            "device seconds",
            "Mean gap between the tokens of a request.",
            buckets=_GAP,
        ),
        _series("e2e_request_latency_seconds", "device seconds", "From arrival to end.", buckets=_PHASE),
        _series("request_queue_time_seconds", "device seconds", "From arrival to first admission.", buckets=_PHASE),
        _series("request_inference_time_seconds", "device seconds", "From first admission to end.", buckets=_PHASE),
        _series(
            "request_prefill_time_seconds", "device seconds", "From first admission to first token.", buckets=_PHASE
        ),
        _series("request_decode_time_seconds", "device seconds", "From first token to end.", buckets=_PHASE),
        _series("request_prompt_tokens", "tokens", "Length of a request's prompt.", buckets=lengths),
        _series("request_generation_tokens", "tokens", "Length of a request's output.", buckets=lengths),
        _series(
            "request_prefill_kv_computed_tokens",
            "tokens",
            "Tokens of a request's prompt that were computed.",
            buckets=lengths,
        ),
        _series("request_max_num_generation_tokens", "tokens", "Longest output of a request.", buckets=lengths),
        _series("max_num_generation_tokens", "tokens", "The same under llm-d-inference-sim's name.", buckets=lengths),
        _series(
            "request_params_max_tokens", "tokens", "Maximum output tokens that a request asked for.", buckets=lengths
        ),
        _series(
            "request_params_n", "outputs", "Outputs that a request asked for.", buckets=(1.0, 2.0, 5.0, 10.0, 20.0)
        ),
        _series(
            "request_num_preemptions",
            "preemptions",
            "Preemptions of a request.",
            buckets=(1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0),
        ),
        _series("iteration_tokens_total", "tokens", "Tokens computed in a step.", buckets=_ITERATION),
        Series(
            "vllm:lora_requests_info",
            "Unix seconds",
            "Time at which these were the adapters of running and waiting requests.",
            ("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
        ),
        Series(
            "vllm:cache_config_info",
            "1",
            "Configuration of the KV cache; always 1.",
            tuple(CACHE_CONFIG),
        ),
        _series(
            "lora_adapter_loaded", "1", "1 for each adapter in GPU or host memory.", "adapter_name", "level", "pinned"
        ),
        _series("num_gpu_loaded_lora_adapters", "adapters", "Adapters in GPU memory."),
        _series("num_cpu_loaded_lora_adapters", "adapters", "Adapters in host memory."),
        _series("max_gpu_lora_adapters", "adapters", "Maximum adapters in GPU memory."),
        _series(
            "lora_adapter_load_seconds",
            "device seconds",
            "Duration of adapter loads, by transition.",
            "transition",
            buckets=_LOAD,
        ),
    )
    return {one.name.removeprefix("vllm:"): one for one in listed}


SGLANG = ("model_name",)
"""Labels of the metrics of SGLang's frontend."""
SGLANG_SCHEDULER = ("model_name", "engine_type", "tp_rank", "pp_rank")
"""Labels of the metrics of its scheduler; here always `unified`, 0 and 0."""


def sglang_series() -> dict[str, Series]:
    """Return SGLang's series by name, without the prefix."""

    def series(name: str, unit: str, text: str, *labels: str, buckets: tuple[float, ...] = ()) -> Series:
        return Series(f"sglang:{name}", unit, text, (*SGLANG, *labels), buckets)

    def gauge(name: str, unit: str, text: str) -> Series:
        return Series(f"sglang:{name}", unit, text, SGLANG_SCHEDULER)

    ttft = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0, 200.0, 400.0)
    itl = (
        *(0.002, 0.004, 0.006, 0.008, 0.010, 0.015, 0.020, 0.025, 0.030, 0.035, 0.040, 0.060, 0.080, 0.100, 0.200),
        *(0.400, 0.600, 0.800, 1.0, 2.0, 4.0, 6.0, 8.0),
    )
    e2e = (
        *(0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0, 200.0, 400.0),
        *(600.0, 1200.0, 1800.0, 2400.0),
    )
    listed = (
        gauge("num_running_reqs", "requests", "Requests in the batch."),
        gauge("num_queue_reqs", "requests", "Requests that wait for admission."),
        gauge("num_used_tokens", "tokens", "Tokens of the KV pool in use."),
        gauge("max_total_num_tokens", "tokens", "Size of the KV pool."),
        gauge("token_usage", "1", "Share of the KV pool in use; 1 is all of it."),
        gauge("cache_hit_rate", "1", "Tokens found in the prefix cache over tokens looked up, since the start."),
        gauge("gen_throughput", "tokens/s", "Tokens generated per wall second, since it was last asked for."),
        gauge("page_size", "tokens", "Tokens in a block of the KV pool."),
        gauge("num_pages", "blocks", "Blocks of the KV pool."),
        series("prompt_tokens_total", "tokens", "Prompts that have been prefilled, cached tokens included."),
        series("cached_tokens_total", "tokens", "Of these, tokens that a prefix cache had.", "cache_source"),
        series("generation_tokens_total", "tokens", "Tokens generated."),
        series("num_requests_total", "requests", "Requests that ended."),
        series("num_aborted_requests_total", "requests", "Requests that were cancelled."),
        series("time_to_first_token_seconds", "device seconds", "From arrival to first token.", buckets=ttft),
        series("inter_token_latency_seconds", "device seconds", "Gap between two tokens of a request.", buckets=itl),
        series("e2e_request_latency_seconds", "device seconds", "From arrival to end.", buckets=e2e),
    )
    return {one.name.removeprefix("sglang:"): one for one in listed}
