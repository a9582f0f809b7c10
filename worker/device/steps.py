"""A log of engine steps: one row per step, as an engine that counts its batches writes it.

Columns (others are ignored, empty cells are 0):

* `step_s` or `step_ms`: duration of the step;
* `prefill_tokens`: prompt tokens computed in it;
* `decode_seqs`: sequences that added one token;
* `decode_kv_tokens`: the sum of their lengths before the step, prompt and output, including the step's input token;
* `prefill_attn_pairs`: over the prompts of the step the sum of n * (p + n / 2), n new tokens after p cached ones.

The last two columns may be missing: then the time does not depend on them. A row has all fields of the header.
"""

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lorrery.vocabulary.files import repeated

LONGEST_SECONDS = 3600.0
MOST_COUNTED = 2_147_483_647
MOST_PAIRS = 1e15
"""Of one step: a larger value is an error in the log, not a measurement."""
_SAME = 1e-3
"""Allowed relative difference between `step_s` and `step_ms` of a row: one of them may have fewer digits."""


class StepLogError(ValueError):
    """An invalid row; the message names the line."""


@dataclass(frozen=True, slots=True)
class EngineStep:
    """One step of an engine.

    Attributes:
        seconds: its duration.
        prefill_tokens: prompt tokens computed.
        num_decodes: sequences that added one token.
        decode_kv_tokens: KV tokens of those before the step: one each less than their lengths.
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
        StepLogError: an unsuitable header, or an invalid row; the message names the line.
    """
    reader = csv.DictReader(lines)
    columns = set(reader.fieldnames or ())
    if not {"prefill_tokens", "decode_seqs"} <= columns or not columns & {"step_s", "step_ms"}:
        raise StepLogError("line 1: no header with step_s (or step_ms), prefill_tokens and decode_seqs")
    if twice := repeated(reader.fieldnames or ()):
        raise StepLogError(f"line 1: column {twice} is there twice; keep one")
    steps: list[EngineStep] = []
    for cells in reader:
        try:
            _check_whole(cells)
            num_decodes = _count(cells, "decode_seqs")
            step = EngineStep(
                _seconds(cells),
                _count(cells, "prefill_tokens"),
                num_decodes,
                _cached(cells, num_decodes),
                _number(cells, "prefill_attn_pairs", MOST_PAIRS),
            )
        except ValueError as error:
            raise StepLogError(f"line {reader.line_num}: {error}") from None
        if step.prefill_tokens or step.num_decodes:
            steps.append(step)
    return steps


def _check_whole(cells: Mapping[str, str | None]) -> None:
    """Check that a row has as many fields as the header: a truncated row must not count as a step without decodes."""
    if None in cells:
        raise ValueError("the row has more fields than the header")
    missing = [column for column, text in cells.items() if text is None]
    if missing:
        raise ValueError(f"the row is cut off: {', '.join(missing)} is missing")


def _seconds(cells: Mapping[str, str | None]) -> float:
    given = {
        column: _number(cells, column, LONGEST_SECONDS / unit) * unit
        for column, unit in (("step_s", 1.0), ("step_ms", 1e-3))
        if (cells.get(column) or "").strip()
    }
    if not given or not min(given.values()):
        column = "step_s" if "step_s" in cells else "step_ms"
        raise ValueError(f"{next(iter(given), column)} is {cells[column]!r}; it must be more than 0")
    if max(given.values()) - min(given.values()) > _SAME * max(given.values()):
        raise ValueError(f"step_s is {cells['step_s']} and step_ms {cells['step_ms']}; they must be the same time")
    return next(iter(given.values()))


def _cached(cells: Mapping[str, str | None], num_decodes: int) -> int:
    """Return the tokens in the KV cache before the step; 0 if the log does not have them."""
    tokens = _count(cells, "decode_kv_tokens")
    if tokens < num_decodes and (cells.get("decode_kv_tokens") or "").strip():
        raise ValueError(
            f"decode_kv_tokens is {tokens}, of {num_decodes} decode_seqs; it must be at least {num_decodes}: each has"
            " the token that the step computes from (leave the column out if it is not known)"
        )
    return max(tokens - num_decodes, 0)


def _number(cells: Mapping[str, str | None], column: str, most: float) -> float:
    text = (cells.get(column) or "").strip()
    try:
        value = float(text or 0)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"{column} is {text!r}; it must be a number, 0 or more")
    if value > most:
        raise ValueError(f"{column} is {text!r}; it must be at most {most:,.0f}")
    return value


def _count(cells: Mapping[str, str | None], column: str) -> int:
    value = _number(cells, column, MOST_COUNTED)
    if value != int(value):
        raise ValueError(f"{column} is {cells[column]!r}; it must be a whole number")
    return int(value)
