"""Other simulators beside ours: what they are told, and what is shown where they are absent."""

import io
import json
import os
import sys
from contextlib import ExitStack

import pytest
from rich.console import Console

from lab.bench import sim_scenarios, sim_tables
from lab.bench.cluster import BenchBrokenError
from lab.bench.sim_peers import PEERS, Peers
from lab.bench.sim_speed import Core, SimSpeed, SpeedRow

MIXED = {"vidur": sim_scenarios.vidur(6), "mooncake": sim_scenarios.mooncake(3)}

FAKE_DYNAMO = """
import json, os
from types import SimpleNamespace

def run_mocker_trace_replay(trace_files, **options):
    rows = open(trace_files[0]).read().splitlines()
    with open(os.environ["TOLD"], "a") as told:
        print(json.dumps([options, *map(json.loads, rows)]), file=told)
    finished = len(rows) - int(os.environ["LOST"])
    return SimpleNamespace(summary={"completed_requests": finished, "mean_tpot_ms": 12.5})
"""


@pytest.fixture(autouse=True)
def no_peers(monkeypatch):
    for variable in {peer.variable for peer in PEERS}:
        monkeypatch.setenv(variable, "/nowhere/python")


@pytest.fixture
def told(monkeypatch, tmp_path):
    """A package by Dynamo's name that writes what it gets to this file, a line for each run."""
    package = tmp_path / "dynamo"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "_core.py").write_text(FAKE_DYNAMO)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("DYNAMO_PYTHON", str(python))
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    monkeypatch.setenv("LOST", "0")
    return tmp_path / "told"


def shown(peers: Peers) -> str:
    row = SpeedRow("vidur", "a load", 6, 6, 100, {Core.INTERPRETED: [0.5]}, [0.5])
    rows = dict.fromkeys(("vidur", "uniform small", "doubled", "uniform", "mooncake"), row)
    console = Console(file=io.StringIO(), width=160)
    console.print(sim_tables.sim_speed(SimSpeed(rows, peers.rows)))
    return console.file.getvalue()


def test_a_peer_that_is_absent_is_one_line_that_says_how_to_get_it():
    with ExitStack() as stack:
        peers = Peers(MIXED, stack)
        peers.take_turns("vidur")
    assert [row.requests_per_second for row in peers.rows] == [None] * len(PEERS)
    text = shown(peers)
    assert "not installed; pip install vidur==0.0.26, and name that interpreter in VIDUR_PYTHON" in text
    assert "Other simulators" not in text


def test_a_peer_gets_the_same_columns(told):
    with ExitStack() as stack:
        peers = Peers(MIXED, stack)
        for load in MIXED:
            peers.take_turns(load)
    runs = [json.loads(line) for line in told.read_text().splitlines()]
    assert [options["num_workers"] for options, *_ in runs] == [1, 4, 1]
    for load, (options, *rows) in zip(("vidur", "mooncake", "mooncake"), runs, strict=True):
        columns, replica = MIXED[load].columns, MIXED[load].replica
        assert [row["input_length"] for row in rows] == columns.prompt_tokens.tolist()
        assert [row["output_length"] for row in rows] == columns.output_tokens.tolist()
        assert [row["timestamp"] for row in rows] == pytest.approx(columns.at_seconds * 1e3)
        engine = options["extra_engine_args"]["engine"]
        assert engine["num_gpu_blocks"] == replica.max_total_token_num // engine["block_size"]
    unshared = [hash_id for row in runs[0][1:] for hash_id in row["hash_ids"]]
    assert len(set(unshared)) == len(unshared) >= len(MIXED["vidur"].columns)
    assert [row["hash_ids"] for row in runs[1][1:]] == [list(ids) for ids in MIXED["mooncake"].columns.hash_ids]
    text = shown(peers)
    assert "Other simulators" in text
    assert " 12.5 " in text


def test_a_peer_that_leaves_requests_is_an_error(told, monkeypatch):
    monkeypatch.setenv("LOST", "2")
    with ExitStack() as stack:
        peers = Peers(MIXED, stack)
        with pytest.raises(BenchBrokenError, match="4 of 6 finished"):
            peers.take_turns("vidur")


def test_a_peer_that_dies_is_an_error(told, monkeypatch):
    monkeypatch.setenv("TOLD", os.devnull + "/nothing")
    with ExitStack() as stack:
        peers = Peers(MIXED, stack)
        with pytest.raises(BenchBrokenError, match=r"Dynamo .* ended with 1"):
            peers.take_turns("vidur")
