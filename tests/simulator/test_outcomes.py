"""Columns of a simulated run: rows in order of index, times from the run's begin."""

import numpy as np

from lorrery.loadgen.workload.distribution import Distribution
from lorrery.loadgen.workload.outcome import OutcomeTable
from lorrery.simulator.loop.outcomes import OutcomeRecorder
from lorrery.simulator.loop.request import SimulatedRequest
from lorrery.vocabulary.endings import FinishReason
from lorrery.worker.device.output import Ending

S = 10**12


def request(handle: int, arrived_ps: int, outcome: str, finished_ps: int, detail: str = "") -> SimulatedRequest:
    made = SimulatedRequest(handle, 10, 4, arrived_ps, Ending(4, FinishReason.LENGTH))
    made.outcome, made.finished_ps, made.detail = outcome, finished_ps, detail
    return made


def table_of(*ended: SimulatedRequest, start_ps: int = 0) -> OutcomeTable:
    recorder = OutcomeRecorder(start_ps)
    for one in ended:
        recorder.add(one)
    return recorder.table(Distribution())


def test_each_row_has_its_own_detail_in_whatever_order_requests_end() -> None:
    table = table_of(
        request(2, 0, "refused", 0, "too long"),
        request(0, 0, "finished", 5 * S),
        request(1, 0, "timed out", 9 * S, "deadline exceeded"),
    )
    assert table.index.tolist() == [0, 1, 2]
    assert table.status == ["OK", "DEADLINE_EXCEEDED", "INVALID_ARGUMENT"]
    assert table.detail == {1: "deadline exceeded", 2: "too long"}


def test_times_count_from_the_runs_begin_and_unknown_ones_are_nan() -> None:
    done = request(0, 100 * S, "finished", 109 * S)
    done.sequence.first_admitted_ps, done.sequence.first_token_ps = 102 * S, 103 * S
    done.reason, done.output_tokens = FinishReason.LENGTH, 4
    table = table_of(done, request(1, 101 * S, "no worker", 131 * S), start_ps=100 * S)
    assert table.sent_seconds.tolist() == table.intended_seconds.tolist() == [0, 1]
    assert table.end_seconds.tolist() == [9, 31]
    assert table.first_token_seconds[0] == 3
    assert table.last_token_seconds[0] == 9
    assert table.queue_seconds[0] == 2
    assert (table.adapter_load_seconds[0], table.prefill_seconds[0], table.decode_seconds[0]) == (0, 1, 6)
    assert np.isnan(
        [table.first_token_seconds[1], table.last_token_seconds[1], table.queue_seconds[1], table.decode_seconds[1]]
    ).all()
