"""docs/serve.md: `lorrery serve` and every flag that it takes or explains, from the command's own tables."""

from collections.abc import Iterator
from itertools import groupby

from docs.reference.pages import DO_NOT_EDIT, table
from lorrery.cli.serve.flag import Flag
from lorrery.cli.serve.flags import FLAGS
from lorrery.cli.serve.not_taken import groups

INTRODUCTION = f"""# lorrery serve

{DO_NOT_EDIT.format("cli/serve/ and docs/reference/serve_page.py")}

One command, one engine that answers like `vllm serve` with adapters, on a mock GPU: a scheduler, a router and as many
workers as `--data-parallel-size` says, in processes of this machine that end with it.

<!-- not run: serves until it is stopped -->
```sh
lorrery serve meta-llama/Llama-3.1-8B-Instruct --max-loras 4 --max-num-seqs 256 --lora-modules sql=16 chat=8 --port 8000
curl http://127.0.0.1:8000/v1/models
```

* Standard output gets one line, `ready: http://127.0.0.1:8000 serves ...`; warnings go to standard error. `/health` is
  503 until a worker is attached, and again when it stops.
* A worker or another service that dies ends the engine, as it ends vLLM: what runs on other workers (`-dp`) goes on for
  up to `--shutdown-timeout` seconds, new requests get 503, the exit code is 1. Where no worker
  or no scheduler is left, open streams end at once (`NO_WORKER`, `NO_SCHEDULER`). An orchestrator starts it again;
  `lorrery up --restart` starts what dies by itself.
* SIGINT and SIGTERM let running requests end, for `--shutdown-timeout` seconds at most; a second one kills.
* It listens on 127.0.0.1 unless `--host` says otherwise. vLLM listens on every address: give `--host 0.0.0.0`.
* Where a flag is not given, what `engine = "vllm"` sets holds ([engines.md](engines.md)): first come first served,
  chunked prefill, limits by GPU, paged KV cache, prefix cache, one adapter on the GPU, for whose load the step waits,
  and vLLM's host time and kernels. `--max-model-len` is {{max_model_len:,}}; vLLM takes the
  model's own.
* An adapter is `NAME=RANK`, `NAME=PATH` where PATH has an `adapter_config.json`, or vLLM's JSON. Nothing is downloaded,
  and of a PATH only the rank and the projections count. More are loaded by `POST /v1/load_lora_adapter`.
* `--print-config` writes the settings behind the flags, to keep, to change, or to simulate:

```sh
lorrery serve Qwen/Qwen2.5-7B --max-loras 4 --lora-modules sql=16 --print-config
```

<!-- not run: uses the file made of the output above -->
```sh
lorrery serve Qwen/Qwen2.5-7B --lora-modules sql=16 --print-config > engine.toml
lorrery simulate --config engine.toml --rate 10 --duration 3600
```

Environment variables that are settings (`LORRERY_SCHEDULER__...`) do not count here; `--set` does, and wins over all.

## Flags

Several names are of several programs. Underscores may stand for hyphens, and `--flag=true` and `=false` for switches.
"""

OTHERS = """## Other flags of these programs

They are refused, with what to do instead.
"""


def serve_page() -> str:
    """Return the page."""
    from lorrery.cli.serve.settings import MAX_MODEL_LEN

    lines = [INTRODUCTION.format(max_model_len=MAX_MODEL_LEN)]
    for panel, flags in groupby(FLAGS, lambda flag: flag.panel):
        lines += [f"### {panel}", "", *table(("flag", "meaning", "setting"), map(_row, flags))]
    lines += [OTHERS, *table(("flags", "instead"), _others())]
    return "\n".join(lines).rstrip() + "\n"


def _row(flag: Flag) -> tuple[str, str, str]:
    names = ", ".join(f"`{part}`" for name in flag.names for part in name.split("/"))
    return names, flag.help, flag.sets


def _others() -> Iterator[tuple[str, str]]:
    for instead, flags in groups():
        yield " ".join(f"`{flag}`" for flag in sorted(flags)), instead
