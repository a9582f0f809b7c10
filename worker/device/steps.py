"""A log of engine steps: one row per step, as an engine that counts its batches writes it.

Columns (others are ignored, empty cells are 0):

* `step_s` or `step_ms`: how long the step took;
* `prefill_tokens`: prompt tokens computed in it;
* `decode_seqs`: sequences that added one token;
* `decode_kv_tokens`: the sum of their lengths before the step, prompt and output, so with the token that the step
  computes from;
* `prefill_attn_pairs`: over the prompts of the step the sum of n * (p + n / 2), n new tokens after p cached ones.

The last two may be missing: then the time does not depend on them.
"""

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


class StepLogError(ValueError):
    """A row that cannot be; the message names the line."""


@dataclass(frozen=True, slots=True)
class EngineStep:
    """One step of an engine.

    Attributes:
        seconds: its duration.
        prefill_tokens: prompt tokens computed.
        num_decodes: sequences that added one token.
        decode_kv_tokens: tokens those had in the KV cache before: one each less than their lengths.
        prefill_pairs: sum of n * (p + n / 2) over the prompts.
    """

    seconds: float
    prefill_tokens: int
    num_decodes: int
    decode_kv_tokens: int
    prefill_pairs: float


def read_steps(lines: Iterable[str]) -> list[EngineStep]:
    """Read the rows of a CSV file with a header; steps that computed nothing are left out.

    Raises:
        StepLogError: no header that fits, or a row that cannot be; the message names the line.
    """
    reader = csv.DictReader(lines)
    columns = set(reader.fieldnames or ())
    if not {"prefill_tokens", "decode_seqs"} <= columns or not columns & {"step_s", "step_ms"}:
        raise StepLogError("line 1: no header with step_s (or step_ms), prefill_tokens and decode_seqs")
    column, unit = ("step_s", 1.0) if "step_s" in columns else ("step_ms", 1e-3)
    steps: list[EngineStep] = []
    for cells in reader:
        try:
            num_decodes = _count(cells, "decode_seqs")
            step = EngineStep(
                _number(cells, column) * unit,
                _count(cells, "prefill_tokens"),
                num_decodes,
                max(_count(cells, "decode_kv_tokens") - num_decodes, 0),
                _number(cells, "prefill_attn_pairs"),
            )
            if not step.seconds:
                raise ValueError(f"{column} is {cells[column]!r}; it must be more than 0")
        except ValueError as error:
            raise StepLogError(f"line {reader.line_num}: {error}") from None
        if step.prefill_tokens or step.num_decodes:
            steps.append(step)
    return steps


def _number(cells: Mapping[str, str | None], column: str) -> float:
    text = (cells.get(column) or "").strip()
    try:
        value = float(text or 0)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"{column} is {text!r}; it must be a number, 0 or more")
    return value


def _count(cells: Mapping[str, str | None], column: str) -> int:
    value = _number(cells, column)
    if value != int(value):
        raise ValueError(f"{column} is {cells[column]!r}; it must be a whole number")
    return int(value)
