"""Notices and figures as the page gets them."""

import json
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from lorrery.view import frame as f
from lorrery.view.app import View, Watch, view_of
from lorrery.view.record import Record, Recorder
from tests.view.test_model import HELLO, model_of
from tests.view.test_notices import ENDED, IDLE, RUNS, at


def shown(second: int) -> f.Frame:
    """Return a frame of two workers, of which the second makes 20 tokens per second and is busy half of the time."""
    busy = msgspec.structs.replace(
        IDLE, id="worker-1", running=[RUNS], waiting=2, kv=500, tokens=20 * second, busy=second / 2,
        adapters=[f.ResidentRow(0, f.IN_USE, 8), f.ResidentRow(1, f.LOADING, 8, 0.1)],
    )  # fmt: skip
    return at(
        second,
        adapters_new=["sql", "chat", "gone", "unused"] if second == 0 else [],
        tenants_new=["", "acme", "globex"] if second == 0 else [],
        workers=[IDLE, busy],
        unplaced=3,
        held=4,
        adapters=[
            f.AdapterRow(0, 1, 2, 5, 4, second),
            f.AdapterRow(2, 0, 0, 1, 1, 0, unloaded=True),
            f.AdapterRow(3, 0, 0, 1, 1, 0),
        ],
        tenants=[f.TenantRow(1, 1, 2, 1.0, 15 * second, 0), f.TenantRow(2, 0, 0, 0.0, 5 * second, 0)],
        totals=f.Totals(requests=9, output_tokens=20 * second),
        ended=[f.EndedRow(second, 1, 0, 1, 10, 5, 0.0, 0.1 * second, 0.02, 0.003, 1.0, "stop")] if second else [],
    )


def test_a_view_has_the_figures_of_all_frames_so_far() -> None:
    view = view_of(model_of([shown(second) for second in range(5)]))
    assert msgspec.to_builtins(view) == {
        "notices": msgspec.to_builtins(view.notices),
        "lost": [],
        "running": 1,
        "waiting": 9,
        "tokens_per_second": 20.0,
        "ttft": (0.323, 0.423),
        "kv_ratio": 0.25,
        "fullest_kv_ratio": 0.5,
        "workers": [[0.0, 0.0], [20.0, 0.5]],
        "adapters": [["sql", 1, 0, 4, False], ["gone", 0, 0, 0, True], ["chat", 0, 1, 0, False]],
        "tenants": [["acme", 0.75, 1.0, 15.0], ["globex", 0.25, 0.0, 5.0]],
    }
    assert [notice.rule for notice in view.notices] == ["thrash"]


def test_a_watch_has_a_view_with_its_first_frame_then_every_0_4_s_and_whenever_a_worker_is_lost_or_back() -> None:
    watch = Watch(HELLO)

    def has_view(second: float, now: float, **changes: object) -> bool:
        frame = at(second, **changes)
        line = json.loads(watch.line(frame, now))
        assert f.decode_frame(json.dumps(line).encode()) == frame
        return set(View.__struct_fields__) == set(line["view"]) if "view" in line else False

    assert [has_view(n / 10, n / 10) for n in range(6)] == [True, False, False, False, True, False]
    assert has_view(0.6, 0.6, workers=[])
    assert not has_view(0.7, 0.7, workers=[])
    assert has_view(0.8, 0.8)
    assert not has_view(0.9, 0.9)


def test_a_record_that_is_thinned_out_keeps_ended_requests_with_their_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorrery.view.record.MAX_FRAMES", 2)
    named = {name: msgspec.structs.replace(IDLE, id=name) for name in ("first", "second", "third")}

    def frame(second: int, *names: str, ended: Iterable[int] = ()) -> f.Frame:
        rows = [msgspec.structs.replace(ENDED, request=10 * second + 1 + worker, worker=worker) for worker in ended]
        return at(second, workers=[named[name] for name in names], ended=rows, adapters_new=[f"adapter-{second}"])

    recorder = Recorder()
    recorder.add(frame(0, "first", "second"))
    recorder.add(frame(1, "first", "second", ended=(0, 1, f.NO_WORKER)))
    recorder.add(frame(2, "second", "third", ended=(0, 1)))  # the first has gone
    recorder.write(tmp_path / "r", HELLO)
    record = Record(tmp_path / "r")
    begin, end = record.frames()
    assert (begin.at, end.at, record.hello.frame_seconds) == (0.0, 2.0, 0.25)
    assert end.adapters_new == ["adapter-1", "adapter-2"]
    of = {row.request: end.workers[row.worker].id if row.worker >= 0 else None for row in end.ended}
    assert of == {11: None, 12: "second", 10: None, 21: "second", 22: "third"}
