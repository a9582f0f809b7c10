"""Calls every RPC of a running cluster with malformed and hostile messages; innocent streams run beside it.

    python -m tests.fuzz_rpc.fuzz --cases 100000

A call must end in time, with a status that docs/failures.md has, and with its details. Nothing that one sends may break
a stream beside it, put a traceback or more than a few lines into a log, or leave anything behind: requests, KV tokens,
file descriptors, memory. Says which case it was; `--seed N --first CASE --cases 1` sends that one again.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2

from lorrery.service.local.cluster import LocalCluster
from tests.cluster.client import Ask, Client, client_of
from tests.cluster.gauges import nothing_held
from tests.cluster.harness import fork_server, wait_until, write_settings
from tests.fuzz_rpc.cases import FAULTY_ROUTER, OURS, Case, draw_case

CALL_SECONDS = 20.0
"""A call that has not ended by then is stuck."""
PAUSE_SECONDS = 0.02
NUM_CALLERS = 16
NUM_INNOCENTS = 4
MAX_LINES_PER_CASE = 4
MAX_LINE_CHARACTERS = 2000
OVERRIDES = (
    # Every hostile worker that gets an innocent sequence and then leaves counts as one more loss of it.
    "scheduler.max_worker_losses=1000000",
    "scheduler.worker_timeout_seconds=2",  # of hostile workers that say nothing
    "adapters.max_loaded_adapters=64",
    "scheduler.prefix_cache.kind='blocks'",
    "log.level='info'",
)

_Code = grpc.StatusCode
_REFUSED = frozenset({_Code.OK, _Code.INVALID_ARGUMENT})
_BY_METHOD: dict[str, frozenset[grpc.StatusCode]] = {
    "Generate": _REFUSED | {_Code.NOT_FOUND, _Code.FAILED_PRECONDITION, _Code.RESOURCE_EXHAUSTED},
    "LoadAdapter": _REFUSED | {_Code.FAILED_PRECONDITION, _Code.ALREADY_EXISTS, _Code.RESOURCE_EXHAUSTED},
    "RegisterAdapter": _REFUSED | {_Code.FAILED_PRECONDITION, _Code.ALREADY_EXISTS, _Code.RESOURCE_EXHAUSTED},
    "UnloadAdapter": _REFUSED | {_Code.NOT_FOUND},
    "UnregisterAdapter": _REFUSED | {_Code.NOT_FOUND},
    "Attach": _REFUSED | {_Code.FAILED_PRECONDITION, _Code.ALREADY_EXISTS, _Code.ABORTED},
    "WatchKvEvents": _REFUSED | {_Code.RESOURCE_EXHAUSTED},
    "List": frozenset({_Code.UNIMPLEMENTED, _Code.INVALID_ARGUMENT}),
    "Check": _REFUSED | {_Code.NOT_FOUND},
}


@dataclass
class Outcome:
    """What came of a run.

    Attributes:
        statuses: how many calls of which RPC ended how; `hung up` are those that the fuzzer cancelled.
        wrong: what must not be, in words.
        num_innocents: streams that ran beside it.
        lines: that each process wrote.
        memory: resident bytes of each process, after the first part and at the end.
        descriptors: open files of each process, the same.
    """

    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    num_innocents: int = 0
    lines: Counter[str] = field(default_factory=Counter)
    memory: dict[str, tuple[int, int]] = field(default_factory=dict)
    descriptors: dict[str, tuple[int, int]] = field(default_factory=dict)


class LogWatch:
    """Reads what the processes write, and notes what they must not."""

    def __init__(self, outcome: Outcome, show: Callable[[str, str], None]) -> None:
        self._outcome = outcome
        self._show = show

    def __call__(self, name: str, line: str) -> None:
        """Take one line of a process."""
        outcome = self._outcome
        outcome.lines[name] += 1
        self._show(name, line[:MAX_LINE_CHARACTERS])
        if "Traceback" in line or "[error" in line or '"level": "error"' in line:
            outcome.wrong.append(f"{name} logged: {line[:300]}")
        elif len(line) > MAX_LINE_CHARACTERS:
            outcome.wrong.append(f"{name} logged a line of {len(line)} characters: {line[:300]}")
        elif name.startswith("worker-") and "attach" not in line and "[warn" in line:
            outcome.wrong.append(f"{name} logged: {line[:300]}")


async def fuzz(
    folder: Path,
    seed: int,
    num_cases: int,
    first: int = 0,
    *,
    show: Callable[[str, str], None] = lambda _name, _line: None,
    progress: Callable[[int, Outcome], None] = lambda _done, _outcome: None,
) -> Outcome:
    """Send a part of a seed's cases to a cluster of its own; return what came of it.

    Args:
        folder: for its settings.
        seed: of the corpus.
        num_cases: from `first` on.
        first: number of the first case.
        show: gets the processes' lines.
        progress: called now and then with the number of cases done.
    """
    outcome = Outcome()
    cluster = LocalCluster(
        write_settings(folder), OVERRIDES, 2, show=LogWatch(outcome, show), fork_server=fork_server()
    )
    async with cluster:
        scheduler = cluster.processes["scheduler"].grpc
        await cluster.add(FAULTY_ROUTER, "router", [*cluster._overrides, f'router.schedulers=["{scheduler}"]'])
        await cluster.serving(FAULTY_ROUTER)
        async with client_of(cluster) as client:
            # The first part fills what is filled once: caches, tables with bounds, Python's own memory.
            warm_up = num_cases // 4
            before: dict[str, tuple[int, int]] = {}
            lines_before = outcome.lines.total()
            for begin, end in ((first, first + warm_up), (first + warm_up, first + num_cases)):
                async with _innocents(cluster, client, outcome):
                    await _send(cluster, seed, range(begin, end), outcome, lambda n: progress(n, outcome))
                await _settle(cluster, client, outcome)
                if not before:
                    before = _resources(cluster)
            num_lines = outcome.lines.total() - lines_before
            if num_lines > MAX_LINES_PER_CASE * num_cases + 100:
                outcome.wrong.append(f"{num_lines} lines in the logs of {num_cases} cases")
            await _descriptors_as_before(cluster, before, outcome)
            for name, (memory, _) in _resources(cluster).items():
                outcome.memory[name] = before[name][0], memory
        for name, process in cluster.processes.items():
            if process.exit_code is not None:
                outcome.wrong.append(f"{name} ended with {process.exit_code}")
    return outcome


# --- calls ------------------------------------------------------------------------------------------------------------


async def _send(
    cluster: LocalCluster, seed: int, numbers: range, outcome: Outcome, progress: Callable[[int], None]
) -> None:
    left = iter(numbers)

    async def caller() -> None:
        async with contextlib.AsyncExitStack() as stack:
            channels = {
                name: await stack.enter_async_context(
                    grpc.aio.insecure_channel(process.grpc, options=[("grpc.use_local_subchannel_pool", 1)])
                )
                for name, process in cluster.processes.items()
            }
            for number in left:
                case = draw_case(seed, number)
                status = await _call(channels[case.process], case, outcome)
                outcome.statuses[case.path.rpartition("/")[2], status] += 1
                if (number + 1) % 1000 == 0:
                    progress(number + 1)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(NUM_CALLERS):
            tasks.create_task(caller())


async def _call(channel: grpc.aio.Channel, case: Case, outcome: Outcome) -> str:
    """Make one call; return its status, or that it hung up. Any RPC is a stream both ways on the wire."""
    call = channel.stream_stream(case.path)(timeout=CALL_SECONDS)
    started = time.monotonic()
    try:
        over = await _talk(call, case)
        if not over and call.cancel():
            return "hung up"
        code = await call.code()
    finally:
        call.cancel()
    why = _why_wrong(case, code, await call.details() or "", await call.trailing_metadata())
    if why is not None:
        outcome.wrong.append(f"{case.title}: {why} after {time.monotonic() - started:.1f} s")
    return code.name


async def _talk(call: grpc.aio.StreamStreamCall, case: Case) -> bool:
    """Say what there is to say and read some answers; return whether the call has ended, or is about to."""
    await call._metadata_sent.wait()  # pyright: ignore[reportAttributeAccessIssue]
    for index, message in enumerate(case.messages):
        if call.done():
            return True
        try:
            # As `call.write` does it, which gives a call that has ended meanwhile a status of its own making.
            await call._cython_call.send_serialized_message(message)  # pyright: ignore[reportAttributeAccessIssue]
        except grpc.aio.InternalError:
            return await _read(call, None)
        if index == 0 and case.pause:
            await asyncio.wait([asyncio.ensure_future(call.initial_metadata())], timeout=PAUSE_SECONDS)
    if case.hangs_up:
        return False
    with contextlib.suppress(grpc.aio.InternalError):
        await call.done_writing()
    return await _read(call, case.reads)


async def _read(call: grpc.aio.StreamStreamCall, most: int | None) -> bool:
    """Read so many answers at most; return whether the call has ended: its status comes after the last of them."""
    for _ in itertools.count() if most is None else range(most):
        try:
            if await call.read() is grpc.aio.EOF:
                return True
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return True
    return False


def _why_wrong(case: Case, code: grpc.StatusCode, details: str, trailing: grpc.aio.Metadata | None) -> str | None:
    """Say what is wrong with how a call ended, or None."""
    service, _, method = case.path[1:].rpartition("/")
    shown = f"{code.name}: {details[:300]}"
    if code is _Code.RESOURCE_EXHAUSTED and "larger than max" in details:
        return None
    if code is _Code.OK:
        return None
    reason = _reason(trailing) if service in OURS else "other"
    if reason == "FAULT_INJECTED" and case.process == FAULTY_ROUTER:
        return None
    if code not in _BY_METHOD.get(method, _REFUSED):
        return shown
    return f"{shown}: without ErrorInfo" if reason is None else None


def _reason(trailing: grpc.aio.Metadata | None) -> str | None:
    """Return the reason of an error's `ErrorInfo`; None: it has none."""
    packed = next((value for key, value in trailing or () if key == "grpc-status-details-bin"), None)
    info = error_details_pb2.ErrorInfo()
    if not isinstance(packed, bytes) or not (details := status_pb2.Status.FromString(packed).details):
        return None
    return info.reason if details[0].Unpack(info) and info.domain == "lorrery" else None


# --- beside it --------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _innocents(cluster: LocalCluster, client: Client, outcome: Outcome) -> AsyncIterator[None]:
    """Keep some streams open, of which every token is known beforehand."""
    over = False

    async def streams(rng: random.Random) -> None:
        while not over:
            ask = Ask(rng.getrandbits(64), rng.randint(1, 200), rng.randint(1, 150), rng.choice(("", "lora-0")))
            try:
                (await client.start(ask)).check(cluster.settings)
            except AssertionError as error:
                outcome.wrong.append(f"an innocent stream: {str(error)[:500]}")
            outcome.num_innocents += 1
            client.streams.clear()

    async with asyncio.TaskGroup() as tasks:
        for index in range(NUM_INNOCENTS):
            tasks.create_task(streams(random.Random(index)))
        yield
        over = True


async def _settle(cluster: LocalCluster, client: Client, outcome: Outcome) -> None:
    """Take back what calls have left on purpose, and see that nothing else is left."""
    for adapter_id in await client.adapters():
        if adapter_id not in dict(cluster.settings.adapters.expand()):
            with contextlib.suppress(grpc.aio.AioRpcError):
                await client.unload_adapter(adapter_id)
    try:
        await nothing_held(cluster)
    except AssertionError as error:
        outcome.wrong.append(str(error))


def _resources(cluster: LocalCluster) -> dict[str, tuple[int, int]]:
    """Return resident bytes and the number of open files of each process."""
    found: dict[str, tuple[int, int]] = {}
    for name, process in cluster.processes.items():
        proc = Path(f"/proc/{process.pid}")
        pages = int((proc / "statm").read_text().split()[1])
        found[name] = pages * os.sysconf("SC_PAGE_SIZE"), len(list((proc / "fd").iterdir()))
    return found


async def _descriptors_as_before(cluster: LocalCluster, before: dict[str, tuple[int, int]], outcome: Outcome) -> None:
    def all_closed() -> bool:
        now = _resources(cluster)
        outcome.descriptors = {name: (before[name][1], now[name][1]) for name in now}
        return all(count <= then for then, count in outcome.descriptors.values())

    try:
        await wait_until(all_closed)
    except AssertionError:
        outcome.wrong.append(f"open files before and after: {outcome.descriptors}")


# --- the command ------------------------------------------------------------------------------------------------------


def main() -> int:
    """Send a part of a corpus; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=None, help="unset: drawn")
    parser.add_argument("--logs", action="store_true", help="print what the services write")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    print(f"--seed {seed} --first {options.first} --cases {options.cases}", flush=True)
    shown = 0

    def progress(done: int, outcome: Outcome) -> None:
        nonlocal shown
        print(f"{done:,} cases, {len(outcome.wrong)} wrong, {outcome.num_innocents} streams beside it", flush=True)
        for wrong in outcome.wrong[shown : shown + 20]:
            print(f"  {wrong}", flush=True)
        shown = len(outcome.wrong)

    def show(name: str, line: str) -> None:
        if options.logs:
            print(f"{name} | {line}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        outcome = asyncio.run(fuzz(Path(folder), seed, options.cases, options.first, show=show, progress=progress))
    progress(options.first + options.cases, outcome)
    for (method, status), count in sorted(outcome.statuses.items()):
        print(f"{method:22} {status:20} {count:8,}")
    for name, (before, after) in outcome.memory.items():
        print(f"{name:12} {before / 1e6:7.1f} MB, then {after / 1e6:7.1f} MB; {outcome.lines[name]:,} lines")
    print(f"open files: {outcome.descriptors}")
    return int(bool(outcome.wrong))


if __name__ == "__main__":
    sys.exit(main())
