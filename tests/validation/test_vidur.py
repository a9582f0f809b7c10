"""`lorrery validate vidur`: a run of Vidur's is reproduced, and one that does not fit is told."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from lorrery.cli.validate import app
from lorrery.service.errors import FormatError, SettingsError
from lorrery.validation.vidur import BatchRules, RequestTimes, read_requests, replay
from lorrery.worker.build import read_steps_file
from lorrery.worker.device.batch import Batch
from lorrery.worker.device.fitted import Fitted
from lorrery.worker.device.steps import EngineStep
from tests.worker.device.known import deployment

RULES = BatchRules(max_tokens=600, max_sequences=6, block_size=16, num_blocks=120)
RULE_OPTIONS = ("--max-tokens", "600", "--max-sequences", "6", "--num-blocks", "120")


def vidur(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["vidur", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def step_seconds(tokens: int, pairs: float, num_decodes: int, kv_tokens: int) -> float:
    if tokens:
        return round(5e-3 + 5e-5 * tokens + 4e-9 * pairs, 9)
    return round(9e-3 + 1e-4 * num_decodes + 2e-7 * kv_tokens, 9)


def vidurs_scheduler(arrived: list[float], prompts: list[int], outputs: list[int], rules: BatchRules):
    """Vidur's rules, step by step over every sequence, as long as no preemption is needed; rows of both files."""
    now, coming = 0.0, 0
    rows = [[a, p, o, 0.0, 0.0, 0.0] for a, p, o in zip(arrived, prompts, outputs, strict=True)]
    steps: list[tuple[float, int, int, int, float]] = []
    waiting: list[int] = []
    running: dict[int, int] = {}  # tokens so far
    blocks = lambda tokens: -(-tokens // rules.block_size)  # noqa: E731
    while coming < len(rows) or waiting or running:
        if not waiting and not running:
            now = max(now, arrived[coming])
        while coming < len(rows) and arrived[coming] <= now:
            waiting.append(coming)
            coming += 1
        entering: list[int] = []
        while waiting and len(running) + len(entering) < rules.max_sequences:
            padded = max(prompts[n] for n in [*entering, waiting[0]]) * (len(entering) + 1)
            used = sum(blocks(tokens) for tokens in running.values()) + sum(blocks(prompts[n] + 1) for n in entering)
            free = rules.num_blocks - used - int(rules.watermark * rules.num_blocks)
            if padded > rules.max_tokens or blocks(prompts[waiting[0]] + 1) > free:
                break
            entering.append(waiting.pop(0))
        if entering:
            tokens, pairs = sum(prompts[n] for n in entering), sum(prompts[n] ** 2 / 2 for n in entering)
            took, kv_tokens = step_seconds(tokens, pairs, 0, 0), 0
        else:
            tokens, pairs, kv_tokens = 0, 0.0, sum(running.values())
            took = step_seconds(0, 0.0, len(running), kv_tokens)
        steps.append((took, tokens, 0 if entering else len(running), kv_tokens, pairs))
        for n in entering:
            rows[n][3] = now
        now += took
        for n in entering or list(running):
            running[n] = running.get(n, prompts[n]) + 1
            if entering:
                rows[n][4] = now
            if running[n] == prompts[n] + outputs[n]:
                rows[n][5] = now
                del running[n]
    return rows, steps


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Return a function that records a run; in the file of requests decodes take `slower` times as long."""

    def record(slower: float = 1.0) -> tuple[Path, Path]:
        rng = np.random.default_rng(5)
        arrived = np.cumsum(rng.exponential(0.4, 150)).round(9).tolist()
        prompts, outputs = rng.integers(20, 300, 150).tolist(), rng.integers(1, 60, 150).tolist()
        rows, steps = vidurs_scheduler(arrived, prompts, outputs, RULES)
        for row in rows:
            row[5] = row[4] + (row[5] - row[4]) * slower
        requests_file, steps_file = tmp_path / "requests.csv", tmp_path / "steps.csv"
        for path, header, content in (
            (requests_file, "arrival_s,prompt_tokens,output_tokens,scheduled_s,first_token_s,finish_s", rows),
            (steps_file, "step_s,prefill_tokens,decode_seqs,decode_kv_tokens,prefill_attn_pairs", steps),
        ):
            with path.open("w", newline="") as file:
                csv.writer(file).writerows([header.split(","), *content])
        return requests_file, steps_file

    return record


def test_a_run_by_the_same_rules_is_reproduced(run, tmp_path):
    requests_file, steps_file = run()
    out = tmp_path / "out.json"
    code, output = vidur(requests_file, steps_file, *RULE_OPTIONS, "--json", out)
    assert code == 0, output
    assert "150 of 150 requests have their recorded times" in output
    content = json.loads(out.read_text())
    assert {row["metric"] for row in content["rows"]} == {"queue", "TTFT", "TPOT", "E2E"}
    assert all(abs(row["error"]) < 1e-3 for row in content["rows"])
    assert content["num_steps"] == content["num_recorded_steps"]


def test_a_run_of_other_times_fails(run):
    requests_file, steps_file = run(slower=1.1)
    code, output = vidur(requests_file, steps_file, *RULE_OPTIONS)
    assert code == 1
    tpot = output[output.index("TPOT") : output.index("E2E")]
    assert tpot.count("beyond 3%") == 2
    assert "of 150 requests have their recorded times" in output
    assert "150 of 150" not in output


def test_a_run_by_other_rules_is_told(run):
    requests_file, steps_file = run()
    _, output = vidur(requests_file, steps_file, *RULE_OPTIONS, "--max-sequences", "3")
    assert "150 of 150" not in output


def test_a_prefill_is_as_large_as_its_longest_prompt_makes_it():
    zero = np.zeros(3)
    requests = RequestTimes(zero, np.array([280, 10, 280]), np.array([2, 2, 2]), zero, zero, zero)
    steps = [EngineStep(0.02, 100, 0, 0, 0.0), EngineStep(0.01, 0, 1, 0, 0.0)]
    times, _ = replay(requests, RULES, Fitted(deployment("A100", "Llama-2-7B", steps=steps)))
    # All three have 570 tokens, which 600 would hold; padded to 280 each only two fit.
    assert (times.scheduled == 0).tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("x,1,1,0,0,0", "line 2: could not convert"),
        ("0,0,1,0,0,0", "line 2: prompt_tokens is '0'"),
        ("0,1,1.5,0,0,0", "line 2: output_tokens is '1.5'"),
        ("0,1,1,0,-1,0", "line 2: first_token_s is '-1'"),
    ],
)
def test_requests_that_cannot_be_are_refused(tmp_path, row, message):
    path = tmp_path / "requests.csv"
    path.write_text(f"arrival_s,prompt_tokens,output_tokens,scheduled_s,first_token_s,finish_s\n{row}\n")
    with pytest.raises(FormatError, match=rf"requests\.csv: {message}"):
        read_requests(path)


def test_files_that_do_not_fit_are_refused(run, tmp_path):
    requests_file, steps_file = run()
    with pytest.raises(SettingsError, match="no header with step_s"):
        vidur(requests_file, requests_file)
    with pytest.raises(FormatError, match="no column 'arrival_s'"):
        vidur(steps_file, steps_file)
    with pytest.raises(SettingsError, match=r"requests\.csv: give the run's log of steps after it"):
        vidur(requests_file)
    with pytest.raises(FormatError, match="request 0 cannot be served"):
        vidur(requests_file, steps_file, "--num-blocks", "1")


def test_fitted_steps_of_a_batch_are_those_of_the_log(run):
    _, steps_file = run()
    with steps_file.open() as file:
        row = next(row for row in csv.DictReader(file) if int(row["decode_seqs"]) == 3)
    model = Fitted(deployment("A100", "Llama-2-7B", steps=read_steps_file(steps_file)))
    kv_tokens = int(row["decode_kv_tokens"]) - 3
    assert model.step_ps(Batch((), 3, kv_tokens, kv_tokens)) / 1e12 == pytest.approx(float(row["step_s"]), rel=1e-3)


def test_without_files_the_shipped_run_is_replayed_and_is_within_three_percent(tmp_path):
    out = tmp_path / "out.json"
    code, output = vidur("--json", out)
    assert code == 0, output
    content = json.loads(out.read_text())
    # The rules are the same: with the recorded step times every single request has its recorded times.
    assert content["num_same"] == content["num_requests"] == 2000
    for row in content["rows"]:
        if row["metric"] != "queue":
            assert abs(row["error"]) < 0.02, row
