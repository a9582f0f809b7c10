"""Other simulators, if installed on this machine: the same columns, alternating with ours, by CPU time of the run.

A peer is a file of lab/bench/peers/ that the peer's own interpreter runs, so it neither imports this project nor is one
of its dependencies. An environment variable names the interpreter; without it, this process's is tried.

Identical: arrivals, prompt and output lengths, block hashes, KV tokens, sequences in a batch, tokens in a step,
workers. Different: the step times (Dynamo's are its own polynomials, and Vidur gets the bare loop's straight line), and
what each records. A peer is run only with loads that it supports: none has adapters that occupy memory, and Vidur's
requests have no common prefixes.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cache
from statistics import median

from lab.bench.cluster import BenchBrokenError
from lab.bench.companion import Companion
from lab.bench.sim_scenarios import PROJECT, Scenario
from lorrery.loadgen.workload.request import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Peer:
    """One simulator in one configuration.

    Attributes:
        title: for the report.
        script: its file in lab/bench/peers/.
        package: package that its interpreter must be able to import.
        variable: environment variable that names that interpreter.
        how: how to install it, in its own virtual environment.
        load: of lab/bench/sim_scenarios.py.
        settings: differences from our run of the load.
    """

    title: str
    script: str
    package: str
    variable: str
    how: str
    load: str
    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def interpreter(self) -> str:
        """Path of the interpreter to try."""
        return os.environ.get(self.variable, sys.executable)

    def is_installed(self) -> bool:
        """Return whether the interpreter has the package."""
        return _has(self.interpreter, self.package)

    @property
    def missing(self) -> str:
        """Instructions for a peer that is not installed."""
        return f"{self.title}: not installed; {self.how}, and name that interpreter in {self.variable}"


@cache
def _has(interpreter: str, package: str) -> bool:
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"
    try:
        return subprocess.run([interpreter, "-c", code], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


_DYNAMO = ("dynamo_replay.py", "dynamo", "DYNAMO_PYTHON", "pip install --no-deps ai-dynamo-runtime==1.6.1")
_VIDUR = ("vidur_loop.py", "vidur", "VIDUR_PYTHON", "pip install vidur==0.0.26")
PEERS = (
    Peer("Dynamo 1.6.1 replay, Vidur's run", *_DYNAMO, "vidur"),
    Peer("Vidur 0.0.26, its own run", *_VIDUR, "vidur"),
    Peer("Dynamo 1.6.1 replay, Mooncake, 4 workers, KV router", *_DYNAMO, "mooncake"),
    Peer(
        "Dynamo 1.6.1 replay, Mooncake, 1 worker, blocks of 64",
        *_DYNAMO,
        "mooncake",
        {"num_workers": 1, "block_tokens": 64},
    ),
)


@dataclass(slots=True)
class PeerRow:
    """Cost of a peer's runs.

    Attributes:
        cpu_seconds: of each run; empty: it is not installed.
        mean_tpot_ms: simulated; shows how far its step times and batches are from ours.
    """

    peer: Peer
    num_requests: int
    cpu_seconds: list[float] = field(default_factory=list)
    mean_tpot_ms: float = 0.0

    @property
    def requests_per_second(self) -> float | None:
        """Requests per second of CPU time, of the median run."""
        return self.num_requests / median(self.cpu_seconds) if self.cpu_seconds else None

    def as_json(self) -> dict[str, object]:
        """Return the runs and the derived figures."""
        return {
            "peer": self.peer.title,
            "load": self.peer.load,
            "num_requests": self.num_requests,
            "cpu_seconds": self.cpu_seconds,
            "requests_per_second": self.requests_per_second,
            "mean_tpot_ms": self.mean_tpot_ms,
        }


class Peers:
    """Every peer with its load; installed peers run in turn."""

    def __init__(self, scenarios: Mapping[str, Scenario], stack: ExitStack) -> None:
        self.rows = [PeerRow(peer, len(scenarios[peer.load].columns)) for peer in PEERS]
        self._running = [
            (row, stack.enter_context(_companion(row.peer)), json.dumps(run_of(scenarios[row.peer.load], row.peer)))
            for row in self.rows
            if row.peer.is_installed()
        ]

    def take_turns(self, load: str) -> None:
        """Run each peer once that supports a load.

        Raises:
            BenchBrokenError: a peer has exited, or left requests unfinished.
        """
        for row, companion, line in self._running:
            if row.peer.load != load:
                continue
            answer = companion.ask(line)
            if answer["num_finished"] != row.num_requests:
                raise BenchBrokenError(f"{row.peer.title}: {answer['num_finished']} of {row.num_requests} finished")
            row.cpu_seconds.append(answer["cpu_seconds"])
            row.mean_tpot_ms = answer["mean_tpot_ms"]


def _companion(peer: Peer) -> Companion:
    return Companion(peer.title, [peer.interpreter, str(PROJECT / "lab" / "bench" / "peers" / peer.script)])


def run_of(scenario: Scenario, peer: Peer) -> dict[str, object]:
    """Return a load as a peer receives it: its columns and its cluster's limits."""
    columns, replica = scenario.columns, scenario.replica
    return {
        "at_seconds": columns.at_seconds.tolist(),
        "prompt_tokens": columns.prompt_tokens.tolist(),
        "output_tokens": columns.output_tokens.tolist(),
        "hash_ids": None if columns.hash_ids is None else [list(ids or ()) for ids in columns.hash_ids],
        "hash_tokens": BLOCK_TOKENS,
        "block_tokens": replica.block_size,
        "kv_tokens": replica.max_total_token_num,
        "max_num_seqs": replica.max_num_seqs,
        "max_batched_tokens": replica.step_tokens,
        "chunked": replica.batching == "chunked",
        "num_workers": scenario.num_workers,
        "bare_cost": asdict(scenario.bare_cost),
        **peer.settings,
    }
