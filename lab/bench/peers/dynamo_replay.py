"""NVIDIA Dynamo's compiled offline replay of its mock engine (package `ai-dynamo-runtime`) as a peer.

Its workers, scheduler and block caches run under a virtual clock in Rust; the CPU time is the process's, all threads,
from reading the trace file to the report. Step times are its own polynomials. Requests without block hashes get unique
hashes, so nothing is shared.
"""

import importlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Perform the runs given on standard input."""
    os.environ["DYN_LOG"] = "error"
    core: Any = importlib.import_module("dynamo._core")
    with tempfile.TemporaryDirectory(prefix="bench-dynamo-") as folder:
        trace = Path(folder) / "trace.jsonl"
        for line in sys.stdin:
            run = json.loads(line)
            trace.write_text("".join(json.dumps(row) + "\n" for row in _rows(run)), encoding="ascii")
            engine = {
                "block_size": run["block_tokens"],
                "num_gpu_blocks": run["kv_tokens"] // run["block_tokens"],
                "max_num_seqs": run["max_num_seqs"],
                "max_num_batched_tokens": run["max_batched_tokens"],
                "enable_prefix_caching": run["hash_ids"] is not None,
                "enable_chunked_prefill": run["chunked"],
            }
            started = time.process_time()
            replayed = core.run_mocker_trace_replay(
                [trace],
                extra_engine_args={"engine": engine},
                num_workers=run["num_workers"],
                router_mode="kv_router" if run["num_workers"] > 1 else "round_robin",
                trace_block_size=run["hash_tokens"],
            )
            seconds = time.process_time() - started
            summary = replayed.summary
            answer = {
                "cpu_seconds": seconds,
                "num_finished": summary["completed_requests"],
                "mean_tpot_ms": summary["mean_tpot_ms"],
            }
            print(json.dumps(answer), flush=True)


def _rows(run: dict[str, Any]) -> list[dict[str, object]]:
    columns = zip(run["at_seconds"], run["prompt_tokens"], run["output_tokens"], strict=True)
    rows: list[dict[str, object]] = []
    fresh = 0
    for number, (at_seconds, prompt_tokens, output_tokens) in enumerate(columns):
        num_hashes = -(-prompt_tokens // run["hash_tokens"])
        hash_ids = list(range(fresh, fresh + num_hashes)) if run["hash_ids"] is None else run["hash_ids"][number]
        fresh += num_hashes
        rows.append(
            {
                "timestamp": at_seconds * 1e3,
                "input_length": prompt_tokens,
                "output_length": output_tokens,
                "hash_ids": hash_ids,
            }
        )
    return rows


if __name__ == "__main__":
    main()
