"""`python -m lab.errors`: writes how far predictions are from measured runs, by group, for `lorrery plan` to tell.

    lorrery validate serving --json serving.json
    lorrery validate lora --json lora.json
    lorrery validate slora --json slora.json
    python -m lab.errors serving.json lora.json slora.json

Errors are mean absolute ones, in percent, of the rows that count (`quality` ok).
"""

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from lorrery.validation.nearest import ERRORS, Measured

_POSTED = {"out_tps": "tokens_per_second", "ttft": "ttft", "tpot": "tpot"}
_GPUS = {"a10g": "A10G", "a100-40": "A100-40-SXM", "a100-80": "A100-80-SXM"}


def rows(serving: dict[str, Any], lora: dict[str, Any], slora: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the table's rows."""
    for group in serving["groups"]:
        if group["quality"] == "ok":
            key = group["group"]
            yield {
                "engine": key["backend"],
                "gpu": key["gpu"],
                "model": key["model"],
                "weight": key["weight_dtype"],
                "adapters": "no",
                "runs": group["rows"],
                "tpot": group["tpot_mape"],
                "ttft": group["ttft_mape"],
            }
    for found, kind in ((serving["posted"]["groups"], ""), (lora["groups"], "lora")):
        merged: dict[tuple[str, str, str], dict[str, Any]] = {}
        for group in found:
            if not group.get("engine") or group["quality"] != "ok" or group.get("kind", "") != kind:
                continue
            if (name := _POSTED.get(group["figure"])) is None:
                continue
            key = group["engine"].partition("-")[0], group["gpu"], group.get("weight", "")
            one = merged.setdefault(key, {})
            number, error = one.get(name, (0, 0.0))
            rows_now = group["rows"]
            one[name] = number + rows_now, (number * error + rows_now * group["mape"]) / (number + rows_now)
        for (engine, gpu, weight), figures in merged.items():
            yield {
                "engine": engine,
                "gpu": gpu,
                "model": "",
                "weight": weight,
                "adapters": "yes" if kind else "no",
                "runs": max(number for number, _ in figures.values()),
                **{name: error for name, (_, error) in figures.items()},
            }
    for gpu in dict.fromkeys(row["gpu"] for row in slora["rows"]):
        own = [row for row in slora["rows"] if row["gpu"] == gpu]
        errors = {
            name: 100 * mean(abs(row[error]) for row in own if row[error] is not None)
            for name, error in (("tokens_per_second", "throughput_error"), ("ttft", "first_token_error"))
        }
        yield {
            "engine": "slora",
            "gpu": _GPUS[gpu],
            "model": "",
            "weight": "",
            "adapters": "yes",
            "runs": len(own),
            **errors,
        }


def main() -> None:
    """Write the table."""
    contents = [json.loads(Path(path).read_text(encoding="utf-8")) for path in sys.argv[1:4]]
    with ERRORS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, Measured._fields, restval="", lineterminator="\n")
        writer.writeheader()
        for row in rows(*contents):
            writer.writerow(
                {name: f"{value:.1f}" if isinstance(value, float) else value for name, value in row.items()}
            )


if __name__ == "__main__":
    main()
