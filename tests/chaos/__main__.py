"""`python -m tests.chaos --seed 7 --seconds 300`: kill, stop, add and remove everything, and see that nothing is lost.

See `plan` for what happens, `clients` for the load, `verdicts` and `residue` for what must hold. The exit code is 1 if
something did not; then the seed, what happened and what is wrong are printed, and the logs stay.
"""

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.chaos.clients import Crowd, slowest
from tests.chaos.cluster import EXTRAS, ROUTERS, SERVICES, ChaosCluster, History, chaos_cluster
from tests.chaos.logs import Logs
from tests.chaos.plan import Action, draw_plan
from tests.chaos.residue import check_quiet, snapshot
from tests.chaos.verdicts import wrong_with

LAST_STREAMS_SECONDS = 160.0
MAX_SHOWN = 20


async def run(seed: int, seconds: float, num_streams: int, time_scale: float, folder: Path) -> tuple[History, str]:
    """Run chaos once; return what happened, and a line that sums it up."""
    history = History()
    async with chaos_cluster(folder, history, time_scale) as chaos:
        history.started = time.monotonic()
        crowd = Crowd(chaos.routers, seed, num_streams)
        load = asyncio.create_task(crowd.run(), name="crowd")
        await _follow(chaos, draw_plan(seed, seconds, SERVICES, ROUTERS, EXTRAS), history)
        await chaos.end_loadgen()
        crowd.stopping = True
        history.say("no more requests")
        try:
            await asyncio.wait_for(load, LAST_STREAMS_SECONDS)
        except TimeoutError:
            history.wrong.append(f"streams are open {LAST_STREAMS_SECONDS:.0f} s after the last request")
        history.say("no more streams")
        for outcome in crowd.outcomes:
            if why := wrong_with(outcome, chaos.cluster.settings, history, chaos.logs.losses):
                history.wrong.append(f"{outcome.began - history.started:8.3f} s  {why}: {outcome}")
        history.wrong += await check_quiet(chaos)
        history.say("checked in quiet")
        _check_processes(chaos, history)
        if history.wrong:
            (folder / "metrics.json").write_text(await snapshot(chaos))
    history.wrong += _wrong_in_logs(chaos.logs, history)
    return history, _summary(crowd, chaos.logs, history)


async def _follow(chaos: ChaosCluster, plan: list[Action], history: History) -> None:
    """Do what the plan says when it says, and return when all of it is over."""
    async with asyncio.TaskGroup() as tasks:
        for action in plan:
            await asyncio.sleep(max(0.0, history.started + action.at_seconds - time.monotonic()))
            tasks.create_task(chaos.perform(action), name=str(action))


def _check_processes(chaos: ChaosCluster, history: History) -> None:
    for entry in chaos.cluster.processes.values():
        if entry.exit_code is not None:
            history.wrong.append(f"{entry.name} ended by itself with exit code {entry.exit_code}")


def _wrong_in_logs(logs: Logs, history: History) -> list[str]:
    return [f"{at - history.started:8.3f} s  {name} logged {line[:2000]}" for name, at, line in logs.bad] + logs.floods


def _summary(crowd: Crowd, logs: Logs, history: History) -> str:
    ends = Counter(f"{outcome.code} {outcome.reason}".strip() for outcome in crowd.outcomes)
    tokens = sum(len(outcome.stream.token_ids) for outcome in crowd.outcomes)
    requeued = sum(outcome.stream.finish.usage.num_requeues for outcome in crowd.outcomes if outcome.stream.finish)
    deeds = Counter(event.kind.value for event in history.events)
    return (
        f"{len(crowd.outcomes)} streams, {tokens} tokens, the longest {slowest(crowd.outcomes):.1f} s,"
        f" {requeued} requeues; {dict(ends.most_common())}; {dict(deeds)}, {len(logs.losses)} workers lost,"
        f" {sum(logs.num_lines.values())} log lines"
    )


def main() -> int:
    """Read the command line, run, and tell how it went."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, help="of the plan and the load; default: from the time")
    parser.add_argument("--seconds", type=float, default=300.0, help="how long things happen (default: %(default)g)")
    parser.add_argument("--streams", type=int, default=240, help="open at once (default: %(default)d)")
    parser.add_argument("--time-scale", type=float, default=3.0, help="of the cluster (default: %(default)g)")
    parser.add_argument("--plan", action="store_true", help="print the plan, and do nothing")
    parser.add_argument("--keep", type=Path, help="folder for settings and logs (default: a new one, kept on failure)")
    options = parser.parse_args()
    seed = int(time.time()) if options.seed is None else options.seed
    print(f"chaos: seed {seed}, {options.seconds:g} s, {options.streams} streams at once")
    plan = "\n".join(map(str, draw_plan(seed, options.seconds, SERVICES, ROUTERS, EXTRAS)))
    print(plan, flush=True)
    if options.plan:
        return 0
    folder = options.keep or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    history, summary = asyncio.run(run(seed, options.seconds, options.streams, options.time_scale, folder))
    print(f"chaos: {summary}, {time.monotonic() - started:.0f} s in all")
    print(*(f"chaos: {line}" for line in history.lines if " no more " in line or "quiet" in line), sep="\n")
    if not history.wrong:
        print(f"chaos: nothing is lost, seed {seed}")
        if options.keep is None:
            shutil.rmtree(folder)
        return 0
    print("\nwhat happened:", *history.lines, sep="\n")
    print(f"\nwhat is wrong ({len(history.wrong)}):", *history.wrong[:MAX_SHOWN], sep="\n")
    print(f"\nchaos: FAILED, seed {seed}; logs, settings and metrics in {folder}; again:")
    print(f"  make chaos CHAOS_ARGS='--seed {seed} --seconds {options.seconds:g}'")
    return 1


if __name__ == "__main__":
    sys.exit(main())
