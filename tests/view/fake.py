"""A made-up cluster for tests and for whoever works on the page: frames as a real one gives them, without one.

    .venv/bin/python tests/view/fake.py --workers 64              serves the page live at http://127.0.0.1:8090
    .venv/bin/python tests/view/fake.py --record 60 run.ndjson.gz writes a record of 60 s, and serves that

One tenant asks for far too much, one adapter is loaded again and again, one worker's queue is stuck, one worker is
lost and comes back; names include what a page must not take for markup.
"""

import argparse
import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from lorrery.service.errors import LorreryError
from lorrery.service.web.server import WebServer
from lorrery.view import frame as f
from lorrery.view.app import make_app
from lorrery.view.record import Record, Recorder

HOSTILE = ['</script><img src=x onerror="alert(1)">', "Ünïcode “quotes” 🪐", "it's & <b>bold</b>", "a" * 120]
POOL = 60_000
MAX_LORAS = 8
STEP_SECONDS = 0.02


@dataclass
class FakeSequence:
    request: int
    adapter: int
    tenant: int
    prompt: int
    length: int
    arrived: float
    output: float = 0.0
    queue: float = 0.0
    load: float = 0.0


@dataclass
class FakeWorker:
    name: str
    shard: int
    running: list[FakeSequence] = field(default_factory=list)
    waiting: list[FakeSequence] = field(default_factory=list)
    resident: dict[int, float] = field(default_factory=dict)  # adapter -> ready at
    tokens: int = 0
    busy: float = 0.0
    preempted: int = 0
    stuck: bool = False


class FakeCluster:
    """Advances a made-up cluster by small steps; `frame()` says what has happened since the last one.

    Args:
        num_workers: attached.
        batch: sequences that a worker runs at once.
        seed: of all chance.
        num_shards: schedulers.
        load: requests offered, as a share of what the workers can do.
    """

    def __init__(self, num_workers=4, batch=32, seed=1, num_shards=1, load=1.1):
        self._random = random.Random(seed)
        self.at = 0.0
        self.batch = batch
        self.adapters = HOSTILE + [f"lora-r{8 << (n % 4)}-{n}" for n in range(60)]
        self.tenants = ["", "acme", "globex", *HOSTILE[:2], "greedy"]
        self.num_shards = num_shards
        self.workers = [FakeWorker(f"worker-{n}", n % num_shards) for n in range(num_workers)]
        self.workers[-1].stuck = num_workers > 2
        self._rate = load * num_workers * batch / (120 * STEP_SECONDS)
        self._next, self._due = 1, 0.0
        self._told_adapters, self._told_tenants = {}, {}
        self._totals = dict.fromkeys(f.Totals.__struct_fields__, 0)
        self._of_adapter = {}  # adapter -> [loads, evictions, thrash]
        self._of_tenant = {}  # tenant -> [output, refused]
        self._evicted_at = {}
        self._ended, self._events, self._more = [], [], [0, 0]
        self._lost_until = None
        self._lost = None

    def advance(self, seconds):
        end = self.at + seconds
        while self.at < end - 1e-9:
            self.at = min(end, self.at + STEP_SECONDS * 5)
            self._step(STEP_SECONDS * 5)

    def _event(self, kind, text):
        if len(self._events) < f.MAX_EVENTS:
            self._events.append(f.EventRow(round(self.at, 3), kind, text))
        else:
            self._more[1] += 1

    def _step(self, dt):
        self._arrive(dt)
        self._lose_or_return()
        for worker in self.workers:
            self._admit(worker)
            self._run(worker, dt)

    def _arrive(self, dt):
        self._due += self._rate * dt
        while self._due >= 1:
            self._due -= 1
            self._totals["requests"] += 1
            adapter = min(int(self._random.paretovariate(0.7)) - 2, len(self.adapters) - 1)
            greedy = self._random.random() < 0.5
            tenant = len(self.tenants) - 1 if greedy else self._random.randrange(len(self.tenants) - 1)
            if greedy and self._random.random() < 0.15:
                self._totals["refused"] += 1
                self._of_tenant.setdefault(tenant, [0, 0])[1] += 1
                self._event("refused", f"request of tenant {self.tenants[tenant]!r}: quota max_waiting is 40")
                continue
            length = max(1, int(self._random.gammavariate(2, 60)))
            sequence = FakeSequence(
                self._next, max(-1, adapter), tenant, self._random.randrange(8, 900), length, self.at
            )
            self._next += 1
            min(self.workers, key=lambda w: len(w.running) + len(w.waiting)).waiting.append(sequence)

    def _lose_or_return(self):
        if self._lost is not None and self.at >= self._lost_until:
            self.workers.append(FakeWorker(self._lost.name, self._lost.shard))
            self._event("worker_joined", f"worker {self._lost.name} has attached")
            self._lost = None
        elif self._lost is None and len(self.workers) > 1 and self.at % 30 > 20 and self.at // 30 != self._lost_until:
            self._lost = self.workers.pop(0)
            self._lost_until = self.at + 5
            self._totals["workers_lost"] += 1
            self._event("worker_lost", f"worker {self._lost.name} is lost; {len(self._lost.running)} requests go on")
            self.workers[0].waiting[:0] = self._lost.running + self._lost.waiting

    def _admit(self, worker):
        if worker.stuck and self.at % 20 > 8:
            return
        while worker.waiting and len(worker.running) < self.batch:
            sequence = worker.waiting[0]
            kv = sum(s.prompt + int(s.output) for s in worker.running)
            if kv + sequence.prompt > POOL or not self._has_adapter(worker, sequence):
                return
            worker.waiting.pop(0)
            sequence.queue = max(0.0, self.at - sequence.arrived - sequence.load)
            self._totals["prompt_tokens"] += sequence.prompt
            worker.running.append(sequence)

    def _has_adapter(self, worker, sequence):
        adapter = sequence.adapter
        if adapter < 0:
            return True
        if adapter not in worker.resident:
            used = {s.adapter for s in worker.running}
            free = [a for a in worker.resident if a not in used]
            if len(worker.resident) >= MAX_LORAS:
                if not free:
                    return False
                del worker.resident[free[0]]
                self._evicted_at[worker.name, free[0]] = self.at
                self._of_adapter.setdefault(free[0], [0, 0, 0])[1] += 1
                self._event("evict", f"{self.adapters[free[0]]} leaves worker {worker.name}")
            worker.resident[adapter] = self.at + 0.15
            sequence.load = 0.15
            counts = self._of_adapter.setdefault(adapter, [0, 0, 0])
            counts[0] += 1
            counts[2] += self.at - self._evicted_at.get((worker.name, adapter), -1e9) < 60
            self._totals["loads"] += 1
            self._event("load", f"{self.adapters[adapter]} comes to worker {worker.name}")
        return worker.resident[adapter] <= self.at

    def _run(self, worker, dt):
        if not worker.running:
            return
        worker.busy += dt
        for sequence in list(worker.running):
            before = int(sequence.output)
            sequence.output = min(sequence.length, sequence.output + dt / STEP_SECONDS)
            new = int(sequence.output) - before
            worker.tokens += new
            self._totals["output_tokens"] += new
            self._of_tenant.setdefault(sequence.tenant, [0, 0])[0] += new
            if sequence.output >= sequence.length:
                worker.running.remove(sequence)
                self._end(worker, sequence)

    def _end(self, worker, s):
        self._totals["finished"] += 1
        if len(self._ended) >= f.MAX_ENDED:
            self._more[0] += 1
            return
        decode = s.length * STEP_SECONDS
        prefill = max(0.0, self.at - s.arrived - s.queue - s.load - decode)
        self._ended.append((worker.name, s, [round(s.queue, 3), round(s.load, 3), round(prefill, 3), round(decode, 3)]))

    def frame(self):
        new_adapters, new_tenants = [], []

        def adapter(index):
            return f.BASE_MODEL if index < 0 else _index(self._told_adapters, self.adapters[index], new_adapters)

        def tenant(index):
            return _index(self._told_tenants, self.tenants[index], new_tenants)

        position = {worker.name: n for n, worker in enumerate(self.workers)}
        workers = [self._worker(worker, adapter, tenant) for worker in self.workers]
        now_of = {}  # what adapters and tenants have now: [running, waiting, oldest]
        for worker in self.workers:
            for n, sequences in enumerate((worker.running, worker.waiting)):
                for s in sequences:
                    for key in (("adapter", s.adapter), ("tenant", s.tenant)):
                        row = now_of.setdefault(key, [0, 0, 0.0])
                        row[n] += 1
                        row[2] = max(row[2], n * (self.at - s.arrived))
        adapters = {a for kind, a in now_of if kind == "adapter"} | set(self._of_adapter)
        tenants = {t for kind, t in now_of if kind == "tenant"} | set(self._of_tenant)
        ended = [
            f.EndedRow(
                s.request, position.get(name, -1), adapter(s.adapter), tenant(s.tenant), s.prompt, s.length,
                round(s.arrived, 3), *phases, "stop" if s.request % 3 else "length",
            )
            for name, s, phases in self._ended
        ]  # fmt: skip
        made = f.Frame(
            at=round(self.at, 3),
            shards=[f.Shard(f"127.0.0.1:{51000 + n}", True) for n in range(self.num_shards)],
            workers=workers,
            unplaced=0,
            held=0,
            tenants=[
                f.TenantRow(tenant(t), *_row(now_of.get(("tenant", t))), *self._of_tenant.get(t, [0, 0]))
                for t in sorted(tenants)
            ],
            adapters=[
                f.AdapterRow(adapter(a), *_row(now_of.get(("adapter", a)))[:2], *self._of_adapter.get(a, [0, 0, 0]))
                for a in sorted(adapters)
            ],
            totals=f.Totals(**self._totals),
            ended=ended,
            ended_more=self._more[0],
            events=self._events,
            events_more=self._more[1],
            adapters_new=new_adapters,
            tenants_new=new_tenants,
        )
        self._ended, self._events, self._more = [], [], [0, 0]
        return made

    def watched_anew(self):
        """A new watcher is told all names."""
        self._told_adapters, self._told_tenants = {}, {}

    def _worker(self, worker, adapter, tenant):
        used = {s.adapter for s in worker.running}
        residents = []
        for number, ready in worker.resident.items():
            left = max(0.0, ready - self.at)
            state = f.LOADING if left else f.IN_USE if number in used else f.ON_GPU
            residents.append(f.ResidentRow(adapter(number), state, 8 << (number % 4), round(left, 3)))
        prefills = any(s.output < 10 for s in worker.running)
        return f.Worker(
            id=worker.name,
            shard=worker.shard,
            gpu="A100-80GB-SXM",
            tp=1,
            state="ready",
            running=[
                f.RunningRow(s.request, adapter(s.adapter), tenant(s.tenant), s.prompt, int(s.output))
                for s in worker.running
            ],
            waiting=len(worker.waiting),
            oldest=round(max((self.at - s.arrived for s in worker.waiting), default=0.0), 3),
            kv=min(POOL, sum(s.prompt + int(s.output) for s in worker.running)),
            pool=POOL,
            adapters=residents,
            host=min(40, len(self._of_adapter)),
            step=STEP_SECONDS if worker.running else 0.0,
            kind="idle" if not worker.running else "mixed" if prefills else "decode",
            tokens=worker.tokens,
            busy=round(worker.busy, 3),
            preempted=worker.preempted,
        )


def _index(told, name, new):
    if name not in told:
        told[name] = len(told)
        new.append(name)
    return told[name]


def _row(row):
    return [0, 0, 0.0] if row is None else [row[0], row[1], round(row[2], 3)]


class FakeFeed:
    """A feed of a made-up cluster, in wall time; each watcher has a cluster of its own, which has run for a while.

    Attributes:
        fails_after: frames of a watch until it fails; None: never. May change at any time.
    """

    def __init__(self, num_workers=4, batch=32, seed=1, num_shards=1, fails_after=None):
        self._arguments = (num_workers, batch, seed, num_shards)
        self.fails_after = fails_after
        self.num_watchers = 0

    async def hello(self):
        return f.Hello("live", "llama-2-7b", "a made-up cluster", "0")

    async def frames(self, hz=10.0) -> AsyncIterator[f.Frame]:
        self.num_watchers += 1
        try:
            cluster = FakeCluster(*self._arguments)
            cluster.advance(5.0)
            begun = time.monotonic() - cluster.at
            number = 0
            while self.fails_after is None or number < self.fails_after:
                cluster.advance(max(0.0, time.monotonic() - begun - cluster.at))
                yield cluster.frame()
                number += 1
                await asyncio.sleep(1 / hz)
            raise LorreryError("the made-up cluster is gone")
        finally:
            self.num_watchers -= 1


def fake_record(path: Path, seconds=60.0, every=0.5, num_workers=4, **arguments) -> Record:
    """Write a record of a made-up cluster."""
    cluster, recorder = FakeCluster(num_workers, **arguments), Recorder(every)
    while recorder.next_at <= seconds:
        cluster.advance(recorder.next_at - cluster.at)
        recorder.add(cluster.frame())
    recorder.write(path, f.Hello("record", "llama-2-7b", path.name, "0"))
    return Record(path)


async def serve(source, address="127.0.0.1:0", started=None):
    server = WebServer(make_app(source), address, "--listen")
    where = server.listen()
    if started is None:
        print(f"http://{where}", flush=True)
    else:
        started(where)
    await server.run()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--port", type=int, default=8090)
    parser.add_argument("--record", type=float, metavar="SECONDS")
    parser.add_argument("file", nargs="?", type=Path, default=Path("fake.ndjson.gz"))
    given = parser.parse_args()
    source = FakeFeed(given.workers, given.batch, num_shards=given.shards)
    if given.record is not None:
        source = fake_record(
            given.file, given.record, num_workers=given.workers, batch=given.batch, num_shards=given.shards
        )
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(source, f"127.0.0.1:{given.port}"))


if __name__ == "__main__":
    main()
