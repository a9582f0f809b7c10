"""The names that vLLM has: what a dashboard made for vLLM reads, read here."""

from lab.dashboards.board import Board, Row
from lab.dashboards.panels import (
    COUNT,
    PER_SECOND,
    RATIO,
    REQUESTS_PER_SECOND,
    SECONDS,
    TOKENS_PER_SECOND,
    Query,
    heat,
    leaders,
    lines,
    mean,
    number,
    percentiles,
    quantile,
    rate,
    ratio,
)

ENGINE = 'job="worker", model_name=~"$model_name", instance=~"$instance"'
"Workers only: the HTTP edge exports the same names for the cluster as a whole, and each would count twice."


def summed(gauge: str) -> str:
    """Return a gauge over all engines chosen."""
    return f"sum(vllm:{gauge}{{{ENGINE}}})"


BOARD = Board(
    "vllm",
    "vLLM's names",
    "vLLM's series, as read by its own dashboards, autoscalers and pickers, from every worker.",
    [
        Row(
            "Now",
            [
                number("Running", "Requests in the engines' batches.", summed("num_requests_running"), COUNT),
                number(
                    "Waiting",
                    "Requests waiting for an engine. Autoscalers use this one.",
                    summed("num_requests_waiting"),
                    COUNT,
                ),
                number(
                    "KV cache",
                    "Of the fullest engine. Pickers avoid engines near 100 %.",
                    f"max(vllm:kv_cache_usage_perc{{{ENGINE}}})",
                    RATIO,
                    {"orange": 0.8, "red": 0.95},
                ),
                number(
                    "Generation tokens/s",
                    "Made, per wall second.",
                    rate("vllm:generation_tokens_total", match=ENGINE),
                    TOKENS_PER_SECOND,
                ),
                number(
                    "TTFT p95",
                    "Device seconds.",
                    quantile(0.95, "vllm:time_to_first_token_seconds", match=ENGINE),
                    SECONDS,
                    {"orange": 1, "red": 2.5},
                ),
                number(
                    "Adapters on GPUs",
                    "Summed over the engines.",
                    summed("num_gpu_loaded_lora_adapters"),
                    COUNT,
                ),
            ],
        ),
        Row(
            "Latency",
            [
                lines(
                    "E2E request latency",
                    "Device seconds. Look for p99 that diverges from p50.",
                    percentiles("vllm:e2e_request_latency_seconds", ENGINE, quantiles=(0.5, 0.9, 0.95, 0.99)),
                    SECONDS,
                ),
                lines(
                    "Time to first token",
                    "Device seconds.",
                    percentiles("vllm:time_to_first_token_seconds", ENGINE, quantiles=(0.5, 0.9, 0.95, 0.99)),
                    SECONDS,
                ),
                lines(
                    "Inter-token latency",
                    "Device seconds. vLLM's first bucket ends at 10 ms: below it percentiles are a guess, the mean is"
                    " not.",
                    percentiles("vllm:inter_token_latency_seconds", ENGINE, quantiles=(0.5, 0.9, 0.95, 0.99)),
                    SECONDS,
                ),
                lines(
                    "Queue, prefill and decode",
                    "Mean per request, device seconds.",
                    [
                        Query(mean("vllm:request_queue_time_seconds", match=ENGINE), "queue"),
                        Query(mean("vllm:request_prefill_time_seconds", match=ENGINE), "prefill"),
                        Query(mean("vllm:request_decode_time_seconds", match=ENGINE), "decode"),
                    ],
                    SECONDS,
                    stacked=True,
                ),
                heat(
                    "TTFT",
                    "Requests by their time to first token.",
                    "vllm:time_to_first_token_seconds",
                    SECONDS,
                    match=ENGINE,
                    width=16,
                ),
            ],
        ),
        Row(
            "Engines",
            [
                lines(
                    "Running, waiting by engine",
                    "What a queue-based picker sees. Look for an uneven distribution.",
                    [
                        Query(f"vllm:num_requests_running{{{ENGINE}}}", "{{instance}} running"),
                        Query(f"vllm:num_requests_waiting{{{ENGINE}}}", "{{instance}} waiting"),
                    ],
                    COUNT,
                ),
                lines(
                    "KV cache by engine",
                    "1 is full. Look for one engine near 1 while others have room.",
                    [Query(f"vllm:kv_cache_usage_perc{{{ENGINE}}}", "{{instance}}")],
                    RATIO,
                    {"orange": 0.8, "red": 0.95},
                    maximum=1,
                ),
                lines(
                    "Tokens/s",
                    "Prompt tokens and generated ones, per wall second.",
                    [
                        Query(rate("vllm:prompt_tokens_total", match=ENGINE), "prompt"),
                        Query(rate("vllm:generation_tokens_total", match=ENGINE), "generation"),
                    ],
                    TOKENS_PER_SECOND,
                ),
                lines(
                    "Finished requests by reason",
                    "Per wall second. length: the limit was reached; stop: an end of sequence or a stop string.",
                    [Query(rate("vllm:request_success_total", "finished_reason", ENGINE), "{{finished_reason}}")],
                    REQUESTS_PER_SECOND,
                    stacked=True,
                ),
                lines(
                    "Prefix cache hits",
                    "Share of the looked-up tokens found; no value where nothing was looked up.",
                    [
                        Query(
                            ratio(
                                rate("vllm:prefix_cache_hits_total", match=ENGINE),
                                rate("vllm:prefix_cache_queries_total", match=ENGINE),
                            ),
                            "hits",
                        )
                    ],
                    RATIO,
                    maximum=1,
                ),
                lines(
                    "Preemptions/s",
                    "Per wall second. Look for more than a few: the KV pool is too small for the batch.",
                    [Query(rate("vllm:num_preemptions_total", match=ENGINE), "preemptions")],
                    PER_SECOND,
                ),
            ],
        ),
        Row(
            "Lengths",
            [
                heat("Prompt lengths", "Requests by prompt tokens.", "vllm:request_prompt_tokens", COUNT, match=ENGINE),
                heat(
                    "Generation lengths",
                    "Requests by generated tokens.",
                    "vllm:request_generation_tokens",
                    COUNT,
                    match=ENGINE,
                ),
            ],
        ),
        Row(
            "Adapters",
            [
                lines(
                    "Loaded adapters by engine",
                    "On the GPU and in host memory, and the maximum on the GPU. Pickers that consider residency read"
                    " these.",
                    [
                        Query(f"vllm:num_gpu_loaded_lora_adapters{{{ENGINE}}}", "{{instance}} GPU"),
                        Query(f"vllm:num_cpu_loaded_lora_adapters{{{ENGINE}}}", "{{instance}} host"),
                        Query(f"vllm:max_gpu_lora_adapters{{{ENGINE}}}", "{{instance}} most"),
                    ],
                    COUNT,
                    width=12,
                ),
                lines(
                    "Engines that have an adapter on the GPU",
                    "By adapter, those on the most engines. Look for popular adapters on few engines.",
                    leaders(
                        f'sum by (adapter_name) (vllm:lora_adapter_loaded{{level="gpu", {ENGINE}}})', "adapter_name"
                    ),
                    COUNT,
                    width=12,
                ),
            ],
        ),
    ],
    ("model_name", "instance"),
)
