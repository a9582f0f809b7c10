"""The services' own code in virtual time: the first seeds; `make fuzz` plays more."""

import os
import subprocess
import sys

import pytest

from tests.virtual.fuzz import check
from tests.virtual.scenario import run

SEEDS, AT_ONCE = 200, 10


@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_no_stream_is_wrong_or_without_an_end_and_nothing_is_left(first: int) -> None:
    assert [wrong for seed in range(first, first + AT_ONCE) if (wrong := check(seed)) is not None] == []


def test_a_seed_is_the_same_run_in_every_process() -> None:
    seeds = (3, 8, 21, 46)
    here = [run(seed).digest for seed in seeds]
    code = f"from tests.virtual.scenario import run\nprint(*(run(seed).digest for seed in {seeds}))"
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        there = subprocess.run(
            [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True, timeout=100
        )
        assert there.stdout.split() == here


def test_the_seeds_have_every_fault_and_what_follows_from_it() -> None:
    text = "\n".join(line for seed in range(60) for line in run(seed).timeline)
    for fault in ("fault: kill", "fault: drain", "fault: stop", "fault: clock", "fault: wall", "Route of", "Attach of"):
        assert fault in text
    for what in (
        "'resumed': True",
        "client cancels",
        "client loads",
        "DEADLINE_EXCEEDED",
        "worker_given_up",
        "has jumped",
    ):
        assert what in text
