"""Frames of several schedulers become one."""

from lorrery.v1 import frame_pb2, router_pb2
from lorrery.view.frame import BASE_MODEL, NO_WORKER, EndedRow, FaultRow, MissingRow, ObjectiveRow, RunningRow
from lorrery.view.wire import Joiner
from lorrery.vocabulary import u32
from lorrery.vocabulary.units import PS_PER_SECOND


def worker(name: str, *rows: tuple[int, int, int, int, int]) -> frame_pb2.WorkerFrame:
    """A worker with a batch of (request, adapter, tenant, prompt, output), numbered as on the wire."""
    columns = [u32.pack(column) for column in zip(*rows, strict=True)] if rows else [b""] * 5
    names = ("requests_u32", "request_adapters_u32", "request_tenants_u32", "prompt_tokens_u32", "output_tokens_u32")
    return frame_pb2.WorkerFrame(
        worker_id=name, gpu="A10G", tensor_parallel=1, **dict(zip(names, columns, strict=True))
    )


def shard(address: str, watch: int = 1, **frame) -> router_pb2.ShardFrame:
    frame.setdefault("totals", frame_pb2.FrameTotals())
    return router_pb2.ShardFrame(
        address=address, connected=True, watch=watch, time_scale=1.0, frame=frame_pb2.Frame(**frame)
    )


def lost(address: str, watch: int = 1) -> router_pb2.ShardFrame:
    return router_pb2.ShardFrame(address=address, connected=False, watch=watch)


def message(*shards: router_pb2.ShardFrame, **others: object) -> router_pb2.WatchClusterResponse:
    return router_pb2.WatchClusterResponse(shards=shards, **others)


def test_names_requests_and_counts_of_two_schedulers_become_one():
    joiner = Joiner(now=0.0)
    one = shard(
        "a:1",
        at_ps=5 * PS_PER_SECOND,
        adapters_new=["lora-x"],
        tenants_new=["acme"],
        workers=[worker("w0", (7, 1, 1, 10, 3))],
        tenants=[frame_pb2.TenantFrame(tenant=1, num_running=1, oldest_ps=PS_PER_SECOND, output_tokens=3)],
        adapters=[frame_pb2.AdapterFrame(adapter=1, num_running=1, num_loads=2)],
        totals=frame_pb2.FrameTotals(requests=4),
    )
    two = shard(
        "b:1",
        at_ps=900 * PS_PER_SECOND,
        adapters_new=["lora-y", "lora-x"],
        tenants_new=["", "acme"],
        workers=[worker("w1", (7, 2, 2, 20, 1), (8, 0, 1, 5, 0))],
        tenants=[
            frame_pb2.TenantFrame(tenant=1, num_running=1),
            frame_pb2.TenantFrame(tenant=2, num_running=1, num_waiting=2, oldest_ps=2 * PS_PER_SECOND),
        ],
        adapters=[frame_pb2.AdapterFrame(adapter=2, num_running=1, num_loads=1)],
        totals=frame_pb2.FrameTotals(requests=2),
        ended=[
            frame_pb2.EndedRequest(request=3, worker=1, adapter=0, tenant=2, arrived_ps=899 * PS_PER_SECOND),
            frame_pb2.EndedRequest(request=4, worker=0, adapter=1, tenant=1, arrived_ps=899 * PS_PER_SECOND),
        ],
        events=[frame_pb2.FrameEvent(at_ps=899 * PS_PER_SECOND, kind="load", text="lora-y on w1")],
    )
    frame = joiner.frame(message(one, two), now=0.0)
    assert frame.at == 5.0  # of the first one's clock
    assert (frame.adapters_new, frame.tenants_new) == (["lora-x", "lora-y"], ["acme", ""])
    assert [(w.id, w.shard) for w in frame.workers] == [("w0", 0), ("w1", 1)]
    assert frame.workers[0].running == [RunningRow(14, 0, 0, 10, 3)]
    assert frame.workers[1].running == [RunningRow(15, 0, 0, 20, 1), RunningRow(17, BASE_MODEL, 1, 5, 0)]
    assert [(row.tenant, row.running, row.waiting, row.oldest) for row in frame.tenants] == [
        (0, 2, 2, 2.0),
        (1, 1, 0, 0.0),
    ]
    assert [(row.adapter, row.running, row.loads) for row in frame.adapters] == [(0, 2, 3)]
    assert frame.totals.requests == 6
    assert frame.ended[0] == EndedRow(7, 1, BASE_MODEL, 0, 0, 0, 4.0, 0, 0, 0, 0, "")
    assert frame.ended[1].worker == NO_WORKER
    assert [event.at for event in frame.events] == [4.0]


def test_a_scheduler_that_comes_back_begins_anew_and_what_it_counted_stays():
    joiner = Joiner(now=0.0)
    rows = {"adapters_new": ["x"], "tenants_new": [""], "workers": [worker("w", (1, 1, 1, 8, 2))]}
    first = joiner.frame(
        message(shard("a:1", at_ps=50 * PS_PER_SECOND, totals=frame_pb2.FrameTotals(requests=3), **rows)), now=0.0
    )
    gone = joiner.frame(message(lost("a:1")), now=1.0)
    assert joiner.frame(message(lost("a:1")), now=1.5) is None  # nothing new
    assert (gone.workers, gone.shards[0].connected, gone.totals.requests) == ([], False, 3)
    again = {"adapters_new": ["y", "x"], "tenants_new": [""], "workers": [worker("w", (1, 2, 1, 8, 0))]}
    back = joiner.frame(message(shard("a:1", 2, at_ps=0, totals=frame_pb2.FrameTotals(requests=1), **again)), now=2.0)
    assert back.totals.requests == 4
    assert back.at == first.at + 2
    assert back.adapters_new == ["y"]
    assert back.workers[0].running[0].adapter == first.workers[0].running[0].adapter
    assert back.workers[0].running[0].request != first.workers[0].running[0].request


def test_time_goes_on_when_the_scheduler_that_was_ahead_is_lost():
    joiner = Joiner(now=0.0)
    behind = router_pb2.ShardFrame(address="a:1", connected=True, watch=1, time_scale=1.0)
    times = [
        joiner.frame(message(shard("a:1", at_ps=PS_PER_SECOND), shard("b:1", at_ps=PS_PER_SECOND)), now=0.0).at,
        joiner.frame(message(behind, shard("b:1", at_ps=2 * PS_PER_SECOND)), now=1.0).at,
        joiner.frame(message(behind, lost("b:1")), now=1.5).at,
        joiner.frame(message(shard("a:1", at_ps=3 * PS_PER_SECOND), lost("b:1")), now=2.0).at,
    ]
    assert sorted(set(times)) == times


def test_one_that_lags_keeps_its_last_state_and_says_nothing_twice():
    joiner = Joiner(now=0.0)
    event = frame_pb2.FrameEvent(at_ps=0, kind="load", text="x on w")
    both = message(shard("a:1", workers=[worker("w0")]), shard("b:1", workers=[worker("w1")], events=[event]))
    assert len(joiner.frame(both, now=0.0).events) == 1
    lagging = router_pb2.ShardFrame(address="b:1", connected=True, watch=1, time_scale=1.0)
    frame = joiner.frame(message(shard("a:1", at_ps=10, workers=[worker("w0")]), lagging), now=0.1)
    assert [w.id for w in frame.workers] == ["w0", "w1"]
    assert frame.events == []


def test_an_adapter_is_unloaded_once_all_schedulers_say_so():
    def heard(*unloaded: bool) -> bool:
        joiner = Joiner(now=0.0)
        shards = [
            shard(f"{number}:1", adapters_new=["x"], adapters=[frame_pb2.AdapterFrame(adapter=1, unloaded=said)])
            for number, said in enumerate(unloaded)
        ]
        (row,) = joiner.frame(message(*shards), now=0.0).adapters
        return row.unloaded

    assert [heard(True, True), heard(True, False), heard(False, True)] == [True, False, False]


def test_a_watch_that_begins_again_at_the_same_scheduler_counts_nothing_twice():
    joiner, totals = Joiner(now=0.0), frame_pb2.FrameTotals(requests=3)
    joiner.frame(message(shard("a:1", at_ps=50 * PS_PER_SECOND, totals=totals)), now=0.0)
    assert joiner.frame(message(lost("a:1")), now=1.0).totals.requests == 3
    totals.requests = 5
    assert joiner.frame(message(shard("a:1", 2, at_ps=52 * PS_PER_SECOND, totals=totals)), now=2.0).totals.requests == 5


def test_faults_missing_workers_and_objectives_of_router_and_schedulers_are_told():
    def fault(rule: str, met: int) -> frame_pb2.ActiveFault:
        return frame_pb2.ActiveFault(rule=rule, num_met=met)

    lost_worker = frame_pb2.MissingWorker(
        worker_id="w", gpu="A10G", tensor_parallel=2, pool_tokens=7, lost_ps=899 * PS_PER_SECOND
    )
    frame = Joiner(now=0.0).frame(
        message(
            shard("a:1", at_ps=5 * PS_PER_SECOND, faults=[fault("slow_worker", 1)]),
            shard("b:1", at_ps=900 * PS_PER_SECOND, faults=[fault("slow_worker", 2)], missing=[lost_worker]),
            faults=[fault("delay", 9)],
            objectives=[router_pb2.ObjectiveCount(name="ttft", num_counted=5, num_missed=1)],
        ),
        now=0.0,
    )
    assert frame.faults == [FaultRow("delay", 9), FaultRow("slow_worker", 3)]
    assert frame.missing == [MissingRow(1, "w", "A10G", 2, 7, 4.0)]
    assert frame.objectives == [ObjectiveRow("ttft", 5, 1)]
