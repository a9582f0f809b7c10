"""A plan's answer as what it takes to deploy it: the engine's flags, and values of the Helm chart.

`lorrery serve` takes the flags of vLLM, and the chart the settings file: simulating either gives the plan's figures.
"""

import shlex
from collections.abc import Mapping
from operator import attrgetter

from lorrery.cli.serve.settings import settings_tables
from lorrery.service.files.reading import to_toml
from lorrery.service.settings.cluster import changed
from lorrery.simulator.plan.shapes import Shape

__all__ = ["engine_command", "helm_values"]

_NAMES: Mapping[str, tuple[str, str]] = {
    "worker.tensor_parallel": ("--tensor-parallel-size", "--tp-size"),
    "worker.weight_dtype": ("--quantization", "--quantization"),
    "worker.kv_dtype": ("--kv-cache-dtype", "--kv-cache-dtype"),
    "scheduler.max_num_seqs": ("--max-num-seqs", "--max-running-requests"),
    "scheduler.max_num_batched_tokens": ("--max-num-batched-tokens", "--chunked-prefill-size"),
    "scheduler.max_req_total_len": ("--max-model-len", "--context-length"),
    "scheduler.block_size": ("--block-size", "--page-size"),
    "adapters.max_loras": ("--max-loras", "--max-loras-per-batch"),
    "adapters.max_cpu_loras": ("--max-cpu-loras", "--max-loaded-loras"),
    "adapters.max_lora_rank": ("--max-lora-rank", "--max-lora-rank"),
}
"""Setting -> its flag of vLLM and of SGLang; both name a type of weights or of the KV cache as `_TYPES`."""
_TYPES = {"int4": "awq", "nvfp4": "modelopt_fp4"}
_UNQUANTIZED = {"bfloat16": "bfloat16", "float16": "half"}
_PROGRAMS = {"vllm": "vllm serve", "sglang": "python -m sglang.launch_server --model-path"}


def engine_command(shape: Shape) -> str | None:
    """Return the command that starts a replica's engine, with the flags that differ from its defaults.

    None: the settings are not of vLLM or SGLang.
    """
    settings = shape.settings
    family = (settings.engine or "").partition("-")[0]
    if family not in _PROGRAMS:
        return None
    place = list(_PROGRAMS).index(family)
    usual = changed({}, {"model": settings.model, "engine": settings.engine, "worker.gpu": settings.worker.gpu})
    words = [*_PROGRAMS[family].split(), settings.model]
    if settings.adapters.expand():
        words.append("--enable-lora")
    for key, names in _NAMES.items():
        value = attrgetter(key)(settings)
        if value is None or value == attrgetter(key)(usual):
            continue
        if key == "worker.weight_dtype" and value in _UNQUANTIZED:
            words += ["--dtype", _UNQUANTIZED[value]]
        else:
            words += [names[place], _TYPES.get(value, str(value))]
    return shlex.join(words)


def helm_values(shape: Shape, num_replicas: int) -> str:
    """Return values of the chart, as YAML: the settings file of the answer, and its replicas."""
    lines = to_toml(settings_tables(shape.settings)).splitlines()
    return "\n".join(
        ["config: |", *(f"  {line}" if line else "" for line in lines), "worker:", f"  replicas: {num_replicas}", ""]
    )
