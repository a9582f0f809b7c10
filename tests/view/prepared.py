"""A record in which known things go wrong at known times, for tests of what the page makes of it.

Three workers and a frame every half second for 90 s. `meek` waits from the start and gets a tenth of what `greedy`
gets. From 20 s on nothing joins worker-1, where 12 wait. From 40 s on `flicker` is loaded again every 5 s. At 60 s
worker-2 is gone.
"""

from pathlib import Path

from lorrery.view import frame as f
from lorrery.view.record import Record, Recorder

SECONDS, EVERY = 90.0, 0.5
STUCK_AT, THRASH_AT, LOST_AT = 20.0, 40.0, 60.0
ADAPTERS = ["flicker", "steady", '<img src=x onerror="document.title=1">']
TENANTS = ["", "greedy", "meek"]


def prepared_record(path: Path) -> Record:
    """Write the record."""
    recorder = Recorder(EVERY)
    while recorder.next_at <= SECONDS:
        recorder.add(frame(recorder.next_at))
    recorder.write(path, f.Hello("record", "Llama-3-8B", "prepared", "0"))
    return Record(path)


def frame(at: float) -> f.Frame:
    """Return the frame of a time."""
    first = at == 0.0
    number = int(at / EVERY)
    thrash = max(0, int((at - THRASH_AT) // 5) + 1) if at >= THRASH_AT else 0
    workers = [worker(at, n) for n in range(3 if at < LOST_AT else 2)]
    ended = [f.EndedRow(10 * number + n, n, n, 1 + n, 100, 20, at - 1.0, 0.4, 0.1, 0.1, 0.4, "length") for n in (0, 1)]
    events = [f.EventRow(at, "worker_lost", "worker-2 is lost")] if at == LOST_AT else []
    return f.Frame(
        at=at,
        adapters_new=ADAPTERS if first else [],
        tenants_new=TENANTS if first else [],
        shards=[f.Shard("127.0.0.1:50051", connected=True)],
        workers=workers,
        unplaced=0,
        held=0,
        tenants=[
            f.TenantRow(1, 20, 0, 0.0, int(at * 900), 0),
            f.TenantRow(2, 2, 12, max(1.0, at - STUCK_AT), int(at * 90), 0),
        ],
        adapters=[
            f.AdapterRow(0, 3, 0, 1 + thrash, thrash, thrash),
            f.AdapterRow(1, 10, 12, 3, 0, 0),
            f.AdapterRow(2, 9, 0, 1, 0, 0),
        ],
        totals=f.Totals(requests=10 * number, finished=10 * number, output_tokens=int(at * 990)),
        ended=[] if first else [ended[0]] if at >= STUCK_AT else ended,
        ended_more=0,
        events=events,
        events_more=0,
    )


def worker(at: float, number: int) -> f.Worker:
    """Return one worker; batches change once a second, but worker-1's stays after STUCK_AT."""
    when = min(at, STUCK_AT) if number == 1 else at
    batch = [f.RunningRow(number * 100_000 + int(when) * 10 + n, n % 3, 1 + n % 2, 100, int(at) % 50) for n in range(8)]
    waiting = 12 if number == 1 else 0
    return f.Worker(
        id=f"worker-{number}",
        shard=0,
        gpu="A100-80GB-SXM",
        tp=1,
        state="ready",
        running=batch,
        waiting=waiting,
        oldest=max(0.5, at - STUCK_AT) if waiting else 0.0,
        kv=1000 * (number + 1),
        pool=10_000,
        adapters=[f.ResidentRow(0, f.LOADING, 8, 0.2), f.ResidentRow(1, f.IN_USE, 16), f.ResidentRow(2, f.ON_GPU, 64)],
        host=3,
        step=0.02,
        kind="decode",
        tokens=int(at * 330),
        busy=at,
        preempted=0,
    )
