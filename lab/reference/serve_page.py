"""Sections of docs/engines.md on `lorrery serve`: every flag, from the command's own tables."""

from collections.abc import Iterator
from itertools import groupby

from lab.reference.pages import table
from lorrery.cli.flags import Flag
from lorrery.cli.serve.arguments import refused, taken
from lorrery.cli.serve.flags import FLAGS

SERVE = """
## lorrery serve

One command runs an engine that behaves like `vllm serve` with adapters, on a mock GPU: a scheduler, a router and
`--data-parallel-size` workers, in processes on this machine that end with it.

<!-- not run: serves until it is stopped -->
```sh
lorrery serve meta-llama/Llama-3.1-8B-Instruct --max-loras 4 --max-num-seqs 256 --lora-modules sql=16 chat=8 --port 8000
curl http://127.0.0.1:8000/v1/models
```

* Standard output gets one line, `ready: http://127.0.0.1:8000 serves ...`; warnings go to standard error. `/health` is
  503 until a worker is attached, and again during shutdown.
* If a worker or another service dies, the engine ends, as vLLM does: requests on other workers (`-dp`) continue for up
  to `--shutdown-timeout` seconds, new ones get 503, and the exit code is 1. If no worker or no scheduler is left, open
  streams end at once (`NO_WORKER`, `NO_SCHEDULER`). `lorrery up --restart` restarts processes instead.
* On SIGINT and SIGTERM running requests may finish, for up to `--shutdown-timeout` seconds; a second signal kills.
* It listens on 127.0.0.1 unless `--host` says otherwise; vLLM listens on every address.
* Flags that are not given have the values of `engine = "vllm"` ([below](#what-each-sets)). `--max-model-len` is the
  model's own, or, if it is less, what the KV cache holds, where vLLM does not start; {max_model_len:,} for a model
  whose own is not in the catalogue.
* Values that vLLM refuses are refused: a `--max-model-len` above the model's own (without
  `VLLM_ALLOW_LONG_MAX_MODEL_LEN=1`), fewer `--max-num-batched-tokens` than `--max-num-seqs`, fewer `--max-cpu-loras`
  than `--max-loras`, another `--max-lora-rank` or `--block-size` than it knows.
* An adapter is `NAME=RANK`, `NAME=PATH` with an `adapter_config.json` in PATH, or vLLM's JSON. Nothing is downloaded,
  and no weights are read: of an `adapter_config.json`, the rank and the projections count. What vLLM refuses in one is
  refused: `use_dora`, `modules_to_save` other than `classifier` and `score`, a `bias` other than `none`, a `peft_type`
  other than `LORA`, and ranks above `--max-lora-rank`, those of `rank_pattern` included.
* `POST /v1/load_lora_adapter` loads further adapters, from a folder that is there (`--set router.mock_adapters=true`:
  also by `rank` alone). Here the weights count too: an `adapter_model.safetensors` whose header and length agree, or an
  `adapter_model.bin`; a config without `r`, `lora_alpha` or `target_modules` is refused. Not checked: whether the model
  has the projections.
* Settings in environment variables (`LORRERY_SCHEDULER__...`) are ignored; `--set` has the highest precedence. All
  ports but HTTP's are free ones, unless `--grpc-port` or `--set`, such as `--set worker.metrics=127.0.0.1:9102`, names
  one; workers' count up from there.
* `--replicas N` or `--ports 8000-8002` (also `8000,8001,8002`; 0 is a free one, as are all without `--ports`) runs a
  fleet of equal, independent engines. Each has a ready line, printed once all serve; `--announce FILE` writes the same
  as JSON, with gRPC addresses, metrics and process ids. If one does not start, none does; one that breaks later ends
  alone, and the exit code is 1 once the others have been stopped. Ports of `--kv-events-config` count up through the
  fleet. A test has it as a [fixture](gateways.md#in-a-test).
* `lorrery faults` takes the gRPC address that ends the ready line, or `--grpc-port`, not that of HTTP: `lorrery faults
  set refuse,first=3 --target 127.0.0.1:50051`.
* `--print-config` prints the equivalent settings, to keep, to change, or to simulate:

<!-- not run: the second uses what the first one has written -->
```sh
lorrery serve Qwen/Qwen2.5-7B --lora-modules sql=16 --print-config > engine.toml
lorrery simulate --config engine.toml --rate 10 --duration 3600
```

### vLLM's quirks

`engine = "vllm-0.32"` sets `router.vllm_quirks`, which keeps what one sees of that version where something else would
make more sense. Answers over HTTP are vLLM's either way ([clients.md](clients.md)).

| what | with quirks | without |
| --- | --- | --- |
| load of a `peft_type` other than `LORA`, with the fields of one | 200 | 500, as of other adapters that are refused |
| `vllm:lora_requests_info`: both labels | the adapters of running requests | those of running, those of waiting ones |
| `vllm:lora_requests_info`: names that are no more | samples with an earlier time | none |
| `vllm:lora_requests_info` before the first request | no sample | one without names |
"""

FLAG_NAMES = """
## Flags of lorrery serve

A flag with several names has those of several programs. Underscores may replace hyphens; switches also take
`--flag=true` and `--flag=false`; the beginning of a name will do if no other begins alike.
"""

WITHOUT_EFFECT = """### Flags without effect

These are taken with a line on standard error that says why they have none.
"""

OTHERS = """### Refused flags

The meaning of these would be lost. They are refused, with what to do instead.
"""


def serve_section() -> str:
    """Return how the command behaves."""
    from lorrery.cli.serve.settings import MAX_MODEL_LEN

    return SERVE.format(max_model_len=MAX_MODEL_LEN)


def flags_section() -> str:
    """Return every flag that the command takes, explains or refuses."""
    lines = [FLAG_NAMES]
    rows: list[tuple[str, str, str]] = []
    for panel, flags in groupby(FLAGS, lambda flag: flag.panel):
        rows += [(f"**{panel}**", "", ""), *map(_row, flags)]
    lines += table(("flag", "meaning", "setting"), rows)
    lines += [WITHOUT_EFFECT, *table(("flags", "why"), _without_effect())]
    lines += [OTHERS, *table(("flags", "instead"), _others())]
    return "\n".join(lines).rstrip() + "\n"


def _row(flag: Flag) -> tuple[str, str, str]:
    names = ", ".join(f"`{part}`" for name in flag.names for part in name.split("/"))
    return names, flag.help, flag.sets


def _without_effect() -> Iterator[tuple[str, str]]:
    reasons: dict[str, list[str]] = {}
    for flag, one in taken().items():
        reasons.setdefault(one.why, []).append(flag)
    for why, flags in reasons.items():
        yield " ".join(f"`{flag}`" for flag in sorted(flags)), why


def _others() -> Iterator[tuple[str, str]]:
    for instead, flags in refused():
        yield " ".join(f"`{flag}`" for flag in sorted(flags)), instead
