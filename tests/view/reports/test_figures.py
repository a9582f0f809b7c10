from itertools import pairwise

import numpy as np
import pytest

from lorrery.view.reports.figures import by_length, failures, groups, phases, quantiles
from lorrery.view.reports.requests import read_requests
from lorrery.view.reports.timeline import read_steps, timeline
from tests.view.reports.runs import failed, poisson, row, write


def requests(folder, rows, **how):
    return read_requests(write(folder, rows, **how) / "requests.csv", [])


def test_quantiles_are_numpys():
    values = np.random.default_rng(3).random(101)
    assert quantiles(np.append(values, np.nan), 0.5, 0.99) == pytest.approx(np.quantile(values, (0.5, 0.99)))


def test_phases_add_up_to_the_whole_and_older_files_say_what_they_know(tmp_path):
    rows = [row(i, i, ttft=0.1 + 0.001 * i) for i in range(200)]
    (everything, *_, slowest) = phases(requests(tmp_path / "new", rows), to_first_token=False)
    parts = dict(everything.seconds)
    assert list(parts) == ["queue", "adapter load", "prefill", "decode"]
    assert sum(parts.values()) == pytest.approx(everything.total, rel=1e-5)
    assert slowest.total > everything.total
    old = requests(
        tmp_path / "old",
        rows,
        columns=[name for name in row(0, 0) if name not in parts and "load" not in name and "prefill_s" not in name],
    )
    assert [name for name, _ in phases(old, to_first_token=True)[0].seconds] == ["queue", "prefill and adapter load"]
    foreign = requests(tmp_path / "foreign", [one | {"queue_seconds": ""} for one in rows])
    assert [name for name, _ in phases(foreign, to_first_token=True)[0].seconds] == ["until the first token"]


def test_a_live_run_shows_what_the_scheduler_did_not_see(tmp_path):
    rows = [row(i, i, intended_seconds=f"{i - 0.05:.6f}") for i in range(1, 50)]
    parts = dict(phases(requests(tmp_path, rows), to_first_token=True)[0].seconds)
    assert parts["client and network"] == pytest.approx(0.05, rel=1e-3)


def test_the_busiest_come_first_and_the_rest_together(tmp_path):
    rows = [row(i, i, adapter_id=f"lora-{min(i, 60)}") for i in range(100)]
    found = groups(requests(tmp_path, rows), "adapter_id", 50)
    assert (found[0].name, found[0].num_requests) == ("lora-60", 40)
    assert len(found) == 51
    assert found[-1].name == "other: 11 more"
    assert sum(one.num_requests for one in found) == 100
    assert sum(one.output_tokens for one in found) == 1100


def test_failures_with_other_numbers_are_one_reason(tmp_path):
    rows = [
        row(0, 0),
        *(failed(i, i, detail=f"prompt has {5000 + i} tokens; max_req_input_len is 4096") for i in (1, 2, 3)),
    ]
    rows.append(failed(4, 4, "NOT_FOUND", "adapter 'x' is not known", adapter_id="x"))
    many, one = failures(requests(tmp_path, rows))
    assert many.reason.startswith("prompt has N tokens; max_req_input_len is N; such as: prompt has 5001 tokens")
    assert (many.count, one.reason) == (3, "adapter 'x' is not known")
    assert (many.first_seconds, many.last_seconds) == (1.0, 3.0)
    assert (one.status, one.most[0]) == ("NOT_FOUND", "x")


def test_the_timeline_keeps_what_requests_took(tmp_path):
    rows = [*poisson(300), failed(300, 40)]
    run = requests(tmp_path, rows)
    bins = timeline(run)
    done = run.completed
    assert (bins.output_tokens * bins.width).sum() == pytest.approx(300 * 11)
    assert (bins.waiting * bins.width).sum() == pytest.approx(300 * 0.04, rel=1e-4)
    served = (run["end_seconds"] - run["sent_seconds"])[done].sum() - 300 * 0.04
    assert (bins.running * bins.width).sum() == pytest.approx(served, rel=1e-4)
    assert (bins.failed * bins.width).sum() == pytest.approx(1)


def test_steps_are_weighted_by_their_time_and_a_long_file_is_read_in_pieces(tmp_path, monkeypatch):
    run = requests(tmp_path, poisson(100))
    bins = timeline(run)
    lines = [
        "worker,step,start_ps,end_ps,step_ps,decode_sequences,prefill_sequences,prefill_tokens,kv_tokens,waiting_sequences"
    ]
    lines += [f"worker-0,{i},{i * 10**9},{(i + 1) * 10**9},{10**9},4,1,7,500,2" for i in range(9000)]
    path = tmp_path / "steps.csv"
    path.write_text("\n".join(lines) + "\n")
    whole = read_steps(path, bins, [])
    inside = bins.at < 8.9
    assert whole.share_read == 1
    assert whole.batch[inside] == pytest.approx(5, rel=0.02)
    assert whole.busy[inside] == pytest.approx(1, rel=0.02)
    monkeypatch.setattr("lorrery.view.reports.timeline._MOST_STEP_BYTES", 96 << 10)
    pieces = read_steps(path, bins, [])
    assert pieces.share_read < 0.3
    assert pieces.batch[np.isfinite(pieces.batch)] == pytest.approx(5)


def test_prompt_lengths_fall_into_classes(tmp_path):
    found = by_length(requests(tmp_path, poisson(2000)))
    assert 8 <= len(found) <= 12
    assert 1900 < sum(one.count for one in found) <= 2000  # a class of fewer than 20 is left out
    assert all(one.low <= one.high < after.low for one, after in pairwise(found))
