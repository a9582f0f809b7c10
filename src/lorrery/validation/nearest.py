"""The measured runs nearest to a deployment, and how far the simulator's figures are from them.

The table has the groups of `lorrery validate serving`, `lora` and `slora` (`data/errors.csv`; `lab.errors` writes it).
The nearest group is the one that has most in common, in this order: GPU, engine, type of the weights, model.
"""

import csv
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["ERRORS", "Measured", "how_far", "measured_groups"]

ERRORS: Final = Path(__file__).parent / "data" / "errors.csv"


class Measured(NamedTuple):
    """A group of measured runs.

    Attributes:
        engine: vllm, sglang, trtllm or slora.
        gpu: by its name in the catalogue.
        model: empty: several.
        weight: type of the weights; empty: several.
        adapters: `yes` or `no`.
        runs: that were compared.
        tokens_per_second: mean absolute error in percent; empty: not measured.
        ttft: likewise.
        tpot: likewise.
    """

    engine: str
    gpu: str
    model: str
    weight: str
    adapters: str
    runs: str
    tokens_per_second: str
    ttft: str
    tpot: str


@cache
def measured_groups() -> list[Measured]:
    """Return the table."""
    with ERRORS.open(encoding="utf-8", newline="") as file:
        return [Measured(**row) for row in csv.DictReader(file)]


def how_far(engine: str, gpu: str, weight: str, model: str, *, adapters: bool) -> str:
    """Return in words which measured runs are nearest to a deployment, and their errors.

    Args:
        engine: vllm, sglang, trtllm or slora.
        gpu: by its name in the catalogue.
        weight: type of the weights.
        model: by its name in the catalogue.
        adapters: whether requests name any.
    """
    asked = {"gpu": gpu, "engine": engine, "weight": weight, "model": model}

    def alike(group: Measured) -> tuple[bool, ...]:
        return tuple(getattr(group, name) == value for name, value in asked.items())

    told = [_in_words(max(_of(adapters=False), key=alike), asked)]
    if adapters:
        told.append(_in_words(max(_of(adapters=True), key=alike), asked))
    return "; ".join(told)


_NAMES = {"gpu": "GPU", "engine": "engine", "weight": "type of weights", "model": "model"}


def _of(*, adapters: bool) -> Iterator[Measured]:
    return (group for group in measured_groups() if group.adapters == ("yes" if adapters else "no"))


def _in_words(group: Measured, asked: dict[str, str]) -> str:
    what = " ".join(filter(None, (group.engine, group.model, group.weight, "on", group.gpu)))
    errors = ", ".join(
        f"{name} {value} %"
        for name, value in (("tokens/s", group.tokens_per_second), ("TTFT", group.ttft), ("TPOT", group.tpot))
        if value
    )
    others = [_NAMES[name] for name, value in asked.items() if getattr(group, name) not in ("", value)]
    note = f"; another {' and '.join(others)} than here" if others else ""
    with_adapters = ", with adapters" if group.adapters == "yes" else ""
    return f"nearest measured runs{with_adapters}: {group.runs} of {what}, mean error {errors}{note}"
