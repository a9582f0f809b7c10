"""Folders as runs leave them, made up."""

import csv
import json
from pathlib import Path

import numpy as np

from lorrery.loadgen.report_files import CSV_COLUMNS

PHASE_COLUMNS = ("queue_seconds", "adapter_load_seconds", "prefill_seconds", "decode_seconds")


def row(index, at, *, ttft=0.1, decode=1.0, tokens=11, queue=0.04, **other):
    """One completed request, as `requests.csv` has it."""
    found = dict.fromkeys(CSV_COLUMNS, "")
    found |= {
        "index": index, "status": "OK", "adapter_id": "lora-0", "prompt_tokens": 100, "output_tokens": tokens,
        "cached_tokens": 0, "intended_seconds": f"{at:.6f}", "sent_seconds": f"{at:.6f}",
        "first_token_seconds": f"{at + ttft:.6f}", "last_token_seconds": f"{at + ttft + decode:.6f}",
        "end_seconds": f"{at + ttft + decode:.6f}", "queue_seconds": f"{queue:.6f}",
        "adapter_load_seconds": "0.010000", "prefill_seconds": f"{ttft - queue - 0.01:.6f}",
        "decode_seconds": f"{decode:.6f}", "num_messages": tokens, "num_requeues": 0, "worker_id": "worker-0",
        "finish_reason": "length",
    }  # fmt: skip
    return found | other


def failed(index, at, status="RESOURCE_EXHAUSTED", detail="the queue is full: 10000 requests wait", **other):
    """One refused request."""
    none = dict.fromkeys(
        ("first_token_seconds", "last_token_seconds", *PHASE_COLUMNS, "worker_id", "finish_reason"), ""
    )
    return row(index, at, tokens=0) | none | {"status": status, "detail": detail, "end_seconds": f"{at:.6f}"} | other


def poisson(number, seed=1, ttft=0.1, rate=10.0):
    """Completed requests whose TTFT and lengths vary."""
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.exponential(1 / rate, number))
    firsts = ttft * rng.lognormal(0, 0.3, number) + 0.06
    prompts = rng.integers(10, 2000, number)
    return [
        row(i, at[i], ttft=firsts[i], prompt_tokens=int(prompts[i]), adapter_id=f"lora-{i % 5}") for i in range(number)
    ]


def write(folder: Path, rows, *, summary=None, columns=CSV_COLUMNS):
    """Write a run's folder; `summary` changes the summary, None leaves it as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "requests.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, dict.fromkeys(columns), extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    content = {
        "kind": "lorrery simulate", "format_version": 1, "lorrery_version": "0.1.0",
        "started_at": "2026-01-02T00:00:00+00:00", "interrupted": False, "warnings": [],
        "options": {"workload": "poisson", "rate": 10.0, "seed": 1},
        "workload": {"num_requests": len(rows), "attribution": "", "notes": ["synthetic"]},
        "cluster": {"model": "Llama-3-8B", "time_scale": 1.0, "num_shards": 1, "workers": [["H100-SXM", 2]]},
        "formulas": {"ttft_ms": "first token - s"}, "summary": {"num_requests": len(rows)},
        "settings": {"scheduler": {"policy": "fcfs"}},
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(content | (summary or {})), encoding="utf-8")
    return folder
