"""Hostile command lines: every subcommand, wrong values for its options, and none may end in a traceback.

A case is drawn by seed and number, and runs in a child forked from this process, which has imported every command.
Wrong is a traceback or a Python warning, an exit code that no help names, an end by a signal, and a time-out
(`child.py` has the bounds), unless a simulation was running: it takes as long as it was asked to.
"""

import argparse
import contextlib
import os
import random
import select
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from lorrery.service.entry_point import set_up_grpc
from tests.fuzz_flags.cases import Case, draw_case, leaves, make_files
from tests.fuzz_flags.child import AT_WORK, WALL_SECONDS, run_case

LATER = (
    "lorrery.cli.serve.settings",
    "lorrery.cli.serve.run",
    "lorrery.cli.up_cluster",
    "lorrery.loadgen.driver",
    "lorrery.simulator.replay.replay",
    "lorrery.view.reports.report",
    "lorrery.simulator.sweep.run",
)
"""Modules that commands import when they run: imported once, before the children are forked."""
CODES = frozenset({0, 1, 2, 130, AT_WORK})
_NOISE = ("Traceback (most recent call last)", "Warning:", "Exception ignored in")
MAX_OUTPUT = 2_000_000
CASES_PER_LINE = 100
"""After so many the run says how far it has come."""


@dataclass
class Outcome:
    """What came of a run: how many cases ended how, and what must not be, in words."""

    codes: Counter[tuple[str, int]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def fuzz(seed: int, numbers: range, *, show: Callable[[str], None] = lambda _line: None) -> Outcome:
    """Run a part of a seed's cases; return what came of it. `show` is given what is wrong, and how far it has come."""
    outcome = Outcome()
    os.environ |= {"COLUMNS": "100", "GRPC_DNS_RESOLVER": "native", "OPENBLAS_NUM_THREADS": "1"}
    set_up_grpc()
    leaves()
    for name in LATER:
        import_module(name)
    for num_done, number in enumerate(numbers):
        if num_done and num_done % CASES_PER_LINE == 0:
            show(f"{num_done:,} of {len(numbers):,} cases done, {len(outcome.wrong)} wrong")
        case = draw_case(seed, number)
        code, output = run(case)
        outcome.codes[case.arguments[0], code] += 1
        if is_wrong(code, output):
            outcome.wrong.append(f"{case.title}\n  exit code {code}, {len(output)} characters: {output[-1500:]}")
            show(outcome.wrong[-1])
    return outcome


def run(case: Case) -> tuple[int, str]:
    """Return a case's exit code, -n after signal n, and all that it wrote."""
    folder = Path(tempfile.mkdtemp(prefix="lorrery-flags-"))
    try:
        make_files(folder)
        with tempfile.TemporaryFile() as output:
            pid = os.fork()
            if pid == 0:
                run_case(case.arguments, folder, output.fileno())
            code = _wait(pid)
            output.seek(0)
            return code, output.read().decode(errors="replace")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def is_wrong(code: int, output: str) -> bool:
    """Return whether a command must not end like that."""
    return code not in CODES or len(output) > MAX_OUTPUT or any(one in output for one in _NOISE)


def _wait(pid: int) -> int:
    descriptor = os.pidfd_open(pid)
    try:
        if not select.select([descriptor], [], [], 2 * WALL_SECONDS)[0]:
            os.kill(pid, signal.SIGKILL)
    finally:
        os.close(descriptor)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what the case has started: processes of a sweep
    return code


def main() -> int:
    """Run a part of a corpus; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=None, help="unset: drawn")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    print(f"--seed {seed} --first {options.first} --cases {options.cases}", flush=True)
    numbers = range(options.first, options.first + options.cases)
    outcome = fuzz(seed, numbers, show=lambda line: print(line, flush=True))
    for (command, code), count in sorted(outcome.codes.items()):
        print(f"{command:12} exit code {code:4} {count:7,}")
    print(f"{len(numbers):,} cases, {len(outcome.wrong)} wrong", flush=True)
    return int(bool(outcome.wrong))


if __name__ == "__main__":
    sys.exit(main())
