"""Every step of a simulation as CSV, one line each; times in whole picoseconds."""

import csv
from collections.abc import Mapping
from typing import TextIO

from lorrery.scheduler.core.facts import Handler
from lorrery.simulator.subscribers.step_span import RunBegan, StepSpan

COLUMNS = (
    "worker",
    "step",
    "start_ps",
    "end_ps",
    "step_ps",
    "decode_sequences",
    "prefill_sequences",
    "prefill_tokens",
    "kv_tokens",
    "waiting_sequences",
)


class StepWriter:
    """Writes steps as they end.

    Args:
        file: open for writing with `newline=""`.
    """

    def __init__(self, file: TextIO) -> None:
        self._writer = csv.writer(file, lineterminator="\n")
        self._writer.writerow(COLUMNS)
        self._num_steps: dict[str, int] = {}
        self._start_ps = 0

    @property
    def handlers(self) -> Mapping[type, Handler]:
        """See `Subscriber`."""
        return {RunBegan: self._begin, StepSpan: self._ran}

    def _begin(self, fact: RunBegan, at_ps: int, member: object) -> None:
        self._start_ps = at_ps

    def _ran(self, span: StepSpan, at_ps: int, member: object) -> None:
        """Write these steps."""
        number = self._num_steps.get(span.worker, 0)
        self._num_steps[span.worker] = number + span.num_steps
        prefill_tokens = sum(chunk.new_tokens for chunk in span.plan.prefills)
        at_ps, step_ps, kv_tokens = span.start_ps - self._start_ps, span.first_ps, span.kv_tokens
        for index in range(span.num_steps):
            # Only the first step of a plan has its prefills, and it is then the only one of its span.
            prefills = len(span.plan.prefills) if index == 0 else 0
            self._writer.writerow(
                (
                    span.worker,
                    number + index,
                    at_ps,
                    at_ps + step_ps,
                    step_ps,
                    span.num_decodes,
                    prefills,
                    prefill_tokens if prefills else 0,
                    kv_tokens + index * span.num_decodes,
                    span.num_waiting,
                )
            )
            at_ps += step_ps
            step_ps += span.slope_ps
