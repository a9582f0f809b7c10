"""docs/engines.md: what each engine preset sets, from the presets' own table."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from docs.reference.pages import DO_NOT_EDIT, table
from lorrery.settings.presets import EnginePreset, presets
from lorrery.worker.build import read_catalogue

INTRODUCTION = f"""# Engines

{DO_NOT_EDIT.format("settings/data/presets.toml and docs/reference/engines_page.py")}

`engine = "vllm"` (or `sglang`, `trtllm`) gives a cluster the defaults of that engine: how batches form, limits, memory,
prefix cache, host time and kernels. The same in a settings file, as `LORRERY_ENGINE=vllm`, and as `--engine vllm` of
`lorrery simulate`, `plan` and `up`; `docker compose up` passes `LORRERY_ENGINE` on. A version may follow, as in
`vllm-0.12`; a bare name is the newest one here.

```sh
lorrery simulate --engine vllm --model Llama-3.1-70B --gpu H200-SXM --tensor-parallel 4 -c 4 --input 1024 --output 64
lorrery simulate --engine sglang --gpu B200 --set scheduler.max_num_seqs=64 --rate 4 --duration 20 --adapters all
lorrery plan --engine trtllm --model Llama-3.1-70B --gpu H200-SXM --tp 2 --weight-dtype fp8 --kv-dtype fp8
```

* **What wins.** A preset stands below the single settings of the layer that names it, and above the layers before:
  file's preset < file's settings < environment's preset < environment's settings < command line's preset < `--set`. So
  `--engine vllm` wins over what a file says of the same settings, and `--set` wins over it. What no preset sets (GPU,
  model, adapters, addresses, queues' bounds) stays.
* **The longest request** is the model's `max_model_len` in the catalogue, or `scheduler.max_total_token_num` where that
  is set and less; a prompt may have a token fewer. What a worker's KV cache cannot hold is refused as ever. So
  `Llama-3-8B`, a cluster's default, takes 8,192 tokens, as its checkpoint does, and `Llama-3.1-8B` 131,072.
* **Memory** is what the device reports, where the catalogue has it (H100, H200, B200), or the label's;
  `worker.gpu_memory_utilization` and `worker.activation_gb` say what the engine takes of it.
* **Workers.** Where an engine is named, `simulate` and `up` have one worker unless `--workers` says otherwise: a closed
  loop of `-c` clients then means what it means to that engine's own benchmark.
* **Adapters** work under each. vLLM's `--max-loras` is 1 unless set, so requests of several adapters take turns there,
  as they do in vLLM: `--set adapters.max_loras=8` is its `--max-loras 8`.
* A setting that cannot go with a preset is refused, and the message names both.

The closed loop of engine benchmarks: `-c` clients start at once, each sends its next request when the last one is
answered, `--requests-per-client` (10) each, and lengths are drawn uniformly from `--length-ratio` times `--input` and
`--output` to these themselves; the end of a sequence is ignored ([workloads.md](workloads.md#closed-loop)).

## What each sets

"""

NOT_MODELLED = """
## What is left out

* SGLang lets a request in by an estimate of what the running ones will still produce (`new_token_ratio`, which falls
  from 0.7 and rises when somebody is put out); here who finds blocks for the prompt enters, and the last to arrive is
  preempted when blocks run out. Its default order, the longest cached prefix first, is here the order of arrival.
* TensorRT-LLM computes prompts whole unless `enable_chunked_prefill` is set; here they are cut at `max_num_tokens`, as
  with it, since prompts longer than that would not run at all.
* The overlap of a step with the scheduling of the next one is in the host time, not in the order of events: a request
  that ends leaves in its last step.
* MAX_UTILIZATION of TensorRT-LLM is `--set scheduler.memory=paged`.
"""


def engines_page() -> str:
    """Return the page."""
    newest = {engine: list(versions.values())[-1] for engine, versions in presets().items()}
    return INTRODUCTION + "\n".join([*_settings(newest), *_gpus(newest), *_versions()]) + NOT_MODELLED


def _settings(newest: Mapping[str, EnginePreset]) -> Iterator[str]:
    values = {engine: dict(_leaves(one.settings)) for engine, one in newest.items()}
    keys = sorted({key for one in values.values() for key in one})
    rows = [(f"`{key}`", *(_value(key, one, newest[engine]) for engine, one in values.items())) for key in keys]
    yield from table(("setting", *newest), rows)


def _value(key: str, values: Mapping[str, Any], one: EnginePreset) -> str:
    if key in values:
        return f"`{_toml(values[key])}`"
    return "unset" if key in one.unset else "by GPU"


def _gpus(newest: Mapping[str, EnginePreset]) -> Iterator[str]:
    yield from ("By GPU:", "")
    rows = []
    for engine, one in newest.items():
        for row in one.by_gpu:
            which = f"{row['min_memory_gb']} GB and more" if "min_memory_gb" in row else "others"
            but_not = f", not {', '.join(row['but_not'])}" if "but_not" in row else ""
            values = ", ".join(f"`{key} = {_toml(value)}`" for key, value in _leaves(row["settings"]))
            rows.append((engine, which + but_not, values))
    yield from table(("engine", "GPU", "sets"), rows)


def _versions() -> Iterator[str]:
    yield from ("Versions, and where the values are from:", "")
    sources = read_catalogue().sources
    rows = []
    for versions in presets().values():
        newest = list(versions.values())[-1]
        names = ", ".join(f"`{one.name}`" for one in versions.values())
        engines = dict.fromkeys(str(one.settings["worker"]["engine"]) for one in versions.values())
        times = "; ".join(f"`{engine}`: {sources[f'engine {engine}']}" for engine in engines)
        rows.append((newest.title, names, newest.source, times))
    yield from table(("engine", "versions", "settings from", "host time and kernels (`worker.engine`)"), rows)


def _leaves(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _toml(value: object) -> str:
    return json.dumps(value)
