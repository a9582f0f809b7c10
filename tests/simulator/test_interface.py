"""`lorrery.simulate`: what Python gives and gets, and that the command gives the same."""

import subprocess
import sys
import types
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

import lorrery
from lorrery.cli.simulate import app
from lorrery.service.settings.cluster import Settings, load
from lorrery.simulator.interface import Overrides, read_settings
from lorrery.vocabulary.files import REQUESTS_FILE

CLUSTER = {"model": "Llama-2-7B", "worker": {"gpu": "A10G"}, "adapters": {"registry": [{"id": "a", "rank": 8}]}}
SHORT = {"rate": 4, "duration": 5, "input_range": "8:64", "output_range": (4, 32)}


def test_columns_and_counts_are_those_of_the_summary():
    result = lorrery.simulate(CLUSTER, SHORT | {"adapters": "a"})
    columns, summary = result.columns, result.summary
    assert len(result) == len(columns) == summary.num_requests > 10
    assert {len(column) for column in columns.as_dict().values()} == {len(result)}
    assert columns.completed.all()
    assert result.counts["output_tokens"] == columns.output_tokens.sum() == summary.output_tokens
    assert columns.ttft_seconds.mean() * 1e3 == pytest.approx(summary.from_intended.ttft_ms.mean)
    assert np.quantile(columns.e2e_seconds, 0.99) * 1e3 == pytest.approx(summary.from_intended.e2e_ms.p99)
    assert np.nanmean(columns.tpot_seconds) * 1e3 == pytest.approx(summary.tpot_ms.mean)
    assert set(columns.adapter_id) == {"a"}
    assert set(columns.worker_id) == {"worker-0", "worker-1"}
    assert set(columns.finish_reason) == {"length"}
    assert (np.diff(columns.arrival_seconds) >= 0).all()
    assert (columns.end_seconds >= columns.arrival_seconds + columns.e2e_seconds - 1e-9).all()


@pytest.mark.parametrize(
    ("flags", "given"),
    [
        ((), {}),
        (
            (
                "--workers",
                "3",
                "--set",
                "scheduler.policy=vtc_fair",
                "--fault",
                "worker_loss,at=1,worker=worker-1,for=2",
            ),
            {
                "workers": 3,
                "overrides": {"scheduler.policy": "vtc_fair"},
                "faults": ["worker_loss,at=1,worker=worker-1,for=2"],
            },
        ),
        (("--seed", "7", "--one-step"), {"seed": 7, "one_step": True}),
    ],
)
def test_the_command_writes_the_same_requests(tmp_path: Path, flags: tuple[str, ...], given: dict):
    asked = ("--rate", "6", "--duration", "4", "--adapters", "all", "--out", str(tmp_path / "command"))
    done = CliRunner().invoke(app, [*asked, *flags])
    assert done.exit_code == 0, done.output
    result = lorrery.simulate(workload={"rate": 6, "duration": 4, "adapters": "all"}, **given)
    result.write(tmp_path / "python")
    assert (tmp_path / "python" / REQUESTS_FILE).read_bytes() == (tmp_path / "command" / REQUESTS_FILE).read_bytes()


def test_settings_are_an_object_or_tables_or_a_file(tmp_path: Path):
    file = tmp_path / "cluster.toml"
    file.write_text('model = "Llama-2-7B"\n[worker]\ngpu = "A10G"\n[adapters]\nregistry = [{ id = "a", rank = 8 }]\n')
    runs = [
        lorrery.simulate(settings, SHORT) for settings in (CLUSTER, Settings.model_validate(CLUSTER), file, str(file))
    ]
    first, *others = runs
    for other in others:
        np.testing.assert_array_equal(other.columns.end_seconds, first.columns.end_seconds)


def test_without_settings_it_is_the_cluster_that_ships(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert read_settings().model == "Llama-3-8B"
    assert len(list(read_settings().adapters.expand())) == 32
    file = tmp_path / "own.toml"
    file.write_text('model = "Llama-2-7B"\n')
    monkeypatch.setenv("LORRERY_CONFIG", str(file))
    assert read_settings().model == "Llama-2-7B"


def test_overrides_win_and_leave_the_given_settings_as_they_were():
    tables = {"scheduler": {"prefix_cache": {"kind": "none"}}}
    changed = read_settings(
        tables, {"scheduler.prefix_cache.kind": "blocks", "scheduler.memory": "paged", "scheduler.policy": "fcfs"}
    )
    assert (changed.scheduler.prefix_cache.kind, changed.scheduler.policy) == ("blocks", "fcfs")
    assert tables == {"scheduler": {"prefix_cache": {"kind": "none"}}}
    settings = Settings.model_validate(CLUSTER)
    assert read_settings(settings, ["time_scale=2"]) == Settings.model_validate(CLUSTER | {"time_scale": 2.0})
    assert read_settings(None, ["time_scale=2"]) == load(Path("deploy/cluster.toml"), ["time_scale=2"])
    with pytest.raises(lorrery.SettingsError, match=r"scheduler\.polcy: no such setting"):
        read_settings(settings, {"scheduler.polcy": "fcfs"})


def test_numbers_of_numpy_are_numbers():
    given = {"rate": np.float32(4), "num_requests": np.int64(3), "input_range": (np.int32(8), np.int64(9))}
    result = lorrery.simulate(CLUSTER, given, workers=np.int64(1), seed=np.uint32(7))
    assert len(result) == 3


def test_requests_of_ones_own_keep_their_rows():
    requests = lorrery.Requests([2.0, 0.0, 1.0], [30, 10, 20], [5, 7, 6], adapter_id=["a", None, "a"], tenant_id="t")
    columns = lorrery.simulate(CLUSTER, requests, workers=1).columns
    assert columns.index.tolist() == [0, 1, 2]
    assert columns.arrival_seconds.tolist() == [2.0, 0.0, 1.0]
    assert columns.prompt_tokens.tolist() == [30, 10, 20]
    assert columns.output_tokens.tolist() == [5, 7, 6]
    assert columns.adapter_id.tolist() == ["a", "", "a"]
    assert columns.tenant_id.tolist() == ["t"] * 3


def test_one_seat_goes_to_the_lowest_priority_and_the_csv_says_whose(tmp_path: Path):
    columns = {"at_seconds": [0.0, 0.1, 0.2, 0.3], "prompt_tokens": [8] * 4, "output_tokens": [64] * 4}
    requests = lorrery.Requests(**columns, priority=[0, 7, -1, 7])
    ends: dict[str, list[int]] = {}
    for policy in ("fcfs", "priority"):
        result = lorrery.simulate(
            CLUSTER, requests, workers=1, overrides={"scheduler.policy": policy, "scheduler.max_num_seqs": 1}
        )
        ends[policy] = np.argsort(result.columns.end_seconds).tolist()
    assert ends == {"fcfs": [0, 1, 2, 3], "priority": [0, 2, 1, 3]}
    result.write(tmp_path)
    header, *rows = (tmp_path / REQUESTS_FILE).read_text().splitlines()
    assert header.endswith(",priority")
    assert [row.rpartition(",")[2] for row in rows] == ["0", "7", "-1", "7"]


@pytest.mark.parametrize("kind", ["blocks", "radix"])
def test_requests_with_different_salts_share_no_prefix(kind: str):
    columns = {"at_seconds": [0.0, 5.0, 10.0, 15.0], "prompt_tokens": [1000] * 4, "output_tokens": [2] * 4}
    requests = lorrery.Requests(**columns, hash_ids=[[1, 2]] * 4, cache_salt=["", "pepper", "pepper", ""])
    engine = {"blocks": "vllm-0.32", "radix": "sglang"}[kind]
    result = lorrery.simulate(CLUSTER, requests, workers=1, overrides={"engine": engine})
    cached = result.columns.cached_tokens.tolist()
    assert cached[:2] == [0, 0]
    assert cached[2] == cached[3] > 900


def test_options_go_for_requests_of_ones_own():
    requests = lorrery.Requests(np.arange(100) / 10, np.full(100, 16), np.full(100, 4))
    result = lorrery.simulate(CLUSTER, {"duration": 8, "speed_up": 2, "adapters": "a"}, requests=requests)
    assert len(result) == 100  # twice as fast, they are due within five seconds
    assert result.columns.arrival_seconds.max() == pytest.approx(9.9 / 2)
    assert set(result.columns.adapter_id) == {"a"}
    assert len(lorrery.simulate(CLUSTER, {"concurrency": 3}, requests=requests)) == 100
    assert result.report.workload.notes[0] == "requests: given by the caller"


def test_a_run_that_fails_in_part_says_who_and_why():
    requests = lorrery.Requests([0.0, 0.0], [16, 10_000], [4, 4])
    result = lorrery.simulate(CLUSTER, requests)
    assert result.columns.status.tolist() == ["OK", "INVALID_ARGUMENT"]
    assert "10000" in result.columns.detail[1].replace(",", "")
    assert np.isnan(result.columns.ttft_seconds[1])
    assert result.counts["num_failed"] == 1


def test_callers_are_told_of_every_end():
    ended: list[int] = []
    result = lorrery.simulate(CLUSTER, SHORT, on_end=lambda request: ended.append(request.handle))
    assert sorted(ended) == result.columns.index.tolist()


def test_series_count_what_the_report_counts(tmp_path: Path):
    path = tmp_path / "metrics.txt"
    lost = ["worker_loss,at=0.5,for=0.5,worker=worker-1"]
    result = lorrery.simulate(CLUSTER, {**SHORT, "adapters": "all"}, workers=2, faults=lost, metrics=path)
    families = text_string_to_metric_families(path.read_text())
    series: dict[str, float] = Counter()
    for sample in [sample for family in families for sample in family.samples]:
        series[sample.name.removeprefix("lorrery_scheduler_")] += sample.value
    cost, summary = result.report.simulation, result.report.summary
    assert cost is not None
    assert series["step_seconds_count"] == series["batch_size_count"] == cost.num_steps
    assert series["plans_total"] == cost.num_plans
    assert series["requests_total"] == series["queue_seconds_count"] == summary.num_requests
    assert series["batch_size_sum"] == series["output_tokens_total"] == result.columns.output_tokens.sum()
    assert series["prompt_tokens_total"] == result.columns.prompt_tokens.sum()
    assert series["workers_lost_total"] == 1
    assert series["workers"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workload": {"speed": 2}}, "no option 'speed'"),
        ({"workload": {"workload": "tpcc"}}, "expected one of"),
        ({"workload": lorrery.LoadOptions(workload="given")}, "needs requests"),
        (
            {"workload": {"trace": "t.csv", "workload": "azure"}, "requests": lorrery.Requests([0], [1], [1])},
            "do not go",
        ),
        ({"workload": {"adapters": "nobody"}}, "'nobody'"),
        ({"workers": 0}, "workers is 0"),
        ({"faults": ["flood,at=1"]}, "flood"),
        ({"settings": {"model": "GPT-9"}}, "GPT-9"),
        ({"settings": [1]}, r"settings is \[1\]; expected Settings, tables, the path of a file, or None"),
        ({"settings": {1: 2}}, "1: Keys should be strings, got 1"),
        ({"overrides": "scheduler.policy=fcfs"}, r"overrides is 'scheduler.policy=fcfs'; expected a list, such as \["),
        ({"overrides": ["scheduler.policy=fcfs", 5]}, "overrides has 5; expected text"),
        ({"overrides": {1: 2}}, "overrides: 1 is no key"),
        ({"overrides": 5}, "overrides is 5; expected a list"),
        ({"faults": "worker_loss,at=1"}, r"faults is 'worker_loss,at=1'; expected a list, such as \["),
        ({"faults": [5]}, "faults has 5; expected text"),
        ({"workload": [1]}, r"workload is \[1\]; expected options by name"),
        (
            {"workload": {"input_range": (1, 2, 3)}},
            r"workload: input_range is \(1, 2, 3\); it must be two whole numbers",
        ),
        ({"workload": {"input_range": ("a", "b")}}, "it must be two whole numbers, from and to or None"),
        ({"workload": {"rate": "fast"}}, "workload: rate is 'fast'; it must be a number"),
        ({"workload": {"num_requests": 1.5}}, "workload: num_requests is 1.5; it must be a whole number or None"),
        ({"workload": {"adapters": ["a"]}}, "adapters is .*; it must be text or None"),
        ({"workload": {"protocol": "http"}}, "protocol is 'http'; it must be 'grpc' or 'openai'"),
        ({"workload": lorrery.LoadOptions(seed=None)}, "workload: seed is None; it must be a whole number"),
        ({"workload": {"seed": -1}}, "seed is -1; it must be "),
        ({"seed": -1}, "seed is -1; it must be a whole number, 0 or more"),
        ({"seed": "a"}, "seed is 'a'"),
        ({"workers": "2"}, "workers is '2'; it must be a whole number, 1 or more"),
        ({"workers": 1.5}, "workers is 1.5"),
        ({"one_step": 1}, "one_step is 1; it must be True or False"),
        ({"seed": 2**32}, "--seed is 4294967296; it must be from 0 to 4,294,967,295"),
        ({"shards": True}, "shards is True"),
        ({"routers": None}, "routers is None"),
        ({"requests": [1]}, r"requests is \[1\]; it must be lorrery.Requests"),
        ({"subscribers": 5}, "subscribers is 5; expected a list"),
        ({"on_end": 5}, "on_end is 5; it must be a function"),
        ({"watch": "x"}, "watch is 'x'; it must be a function"),
        ({"record": 5}, "record is 5; it must be the path of a file"),
        ({"metrics": 5}, "metrics is 5; it must be the path of a file"),
        ({"record": "a\0"}, r"record is 'a\\x00'; it must be the path of a file"),
        ({"workload": {"num_requests": -1}}, "--num-requests is -1; it must be 1 or more"),
        ({"workload": {"duration": -1}}, "--duration is -1; it must be 0 or more"),
        ({"workload": {"duration": float("nan")}}, "--duration is nan; it must be 0 or more"),
        ({"workload": {"concurrency": 0}}, "--concurrency is 0; it must be 1 or more and at most 1,000,000"),
        ({"workload": {"concurrency": 10**10}}, "--concurrency is 10000000000; it must be 1 or more and at most"),
        ({"workload": {"warmup": -5}}, "--warmup is -5; it must be 0 or more"),
        ({"workload": {"timeout": float("nan")}}, "--timeout is nan; it must be 0.001 or more"),
        ({"workload": {"timeout": 0}}, "--timeout is 0; it must be 0.001 or more"),
        ({"record": "r.ndjson", "record_every": "often"}, "record_every is 'often'; it must be a number"),
    ],
)
def test_what_cannot_be_is_refused_in_words(arguments: dict, message: str):
    with pytest.raises(lorrery.LorreryError, match=message):
        lorrery.simulate(**({"settings": CLUSTER} | arguments))


def test_pandas_gets_the_columns(monkeypatch: pytest.MonkeyPatch):
    result = lorrery.simulate(CLUSTER, SHORT)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="needs pandas"):
        result.to_pandas()
    pandas = types.ModuleType("pandas")
    pandas.DataFrame = dict
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    assert result.to_pandas().keys() == result.columns.as_dict().keys()


def test_every_export_is_there_and_none_is_imported_before_it_is_used():
    code = (
        "import sys, lorrery\n"
        "assert not [name for name in sys.modules if name.startswith('lorrery.')], sys.modules\n"
        "for name in lorrery.__all__:\n    getattr(lorrery, name)\n"
        "assert set(lorrery.__all__) <= set(dir(lorrery))\n"
        "assert 'typer' not in sys.modules and 'lorrery.v1' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        lorrery.simulat  # noqa: B018


def test_a_run_beyond_the_log_that_steps_are_fitted_to_says_so(tmp_path: Path):
    log = tmp_path / "steps.csv"
    log.write_text("step_ms,prefill_tokens,decode_seqs\n10,0,1\n11,0,8\n20,8,0\n25,512,0\n")
    worker = {"gpu": "A10G", "step_time": "fitted", "profile": str(log)}

    def warnings(concurrency: int) -> list[str]:
        load = {"concurrency": concurrency, "num_requests": 2 * concurrency, "input_range": 32, "output_range": 8}
        found = lorrery.simulate(CLUSTER | {"worker": worker}, load, workers=1).warnings
        return [line for line in found if "worker.profile" in line]

    assert warnings(8) == []
    (line,) = warnings(20)
    assert line.startswith("step times are extrapolated beyond worker.profile: up to 2")
    assert "(measured: 1 to 8)" in line


def test_numbers_are_read_as_the_command_line_writes_them():
    as_text = {"rate": "4", "duration": "5", "input_range": "8:64", "output_range": "4:32", "num_requests": "9"}
    same = lorrery.simulate(CLUSTER, as_text, seed=3), lorrery.simulate(CLUSTER, SHORT | {"num_requests": 9}, seed=3)
    assert same[0].columns.end_seconds.tolist() == same[1].columns.end_seconds.tolist()
    assert lorrery.simulate(CLUSTER, as_text, one_step=np.bool_(1)).counts["num_completed"] == 9
    with pytest.raises(lorrery.LorreryError, match=r"workload: num_requests is '1\.5'; it must be a whole number"):
        lorrery.simulate(CLUSTER, {"num_requests": "1.5"})


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"scheduler.max_num_seqs": 4}, "scheduler.max_num_seqs = 4 plays no part: it is vLLM's limit, and under"),
        (
            ["scheduler.policy=fcfs", "scheduler.running_max_req_size=4"],
            "it is scheduler.max_num_seqs = 256 that counts",
        ),
        (["scheduler.policy=fcfs", "scheduler.max_num_seqs=4"], None),
        (["scheduler.limits=vllm", "scheduler.max_num_seqs=4"], None),
        ({"scheduler.running_max_req_size": 4}, None),
    ],
)
def test_a_limit_on_running_requests_that_does_not_count_is_told(overrides: Overrides, told: str | None) -> None:
    result = lorrery.simulate(None, {"rate": 4, "num_requests": 3}, overrides=overrides)
    assert [told in warning for warning in result.warnings] == ([] if told is None else [True])


RAISES_ONCE = """
from lorrery.scheduler.core.queues.base import ListedQueue


class Own(ListedQueue):
    def __init__(self, at):
        super().__init__()
        self.at, self.calls = at, 0

    def admit(self, admission, running, at_ps):
        for sequence in list(self):
            if not admission.admit(sequence):
                break
        self._waiting.remove_all(admission.admitted)
        return []

    def wakes_at_ps(self, at_ps):
        return None

    def decoded(self, running, num_steps):
        self.calls += 1
        if self.calls == self.at:
            raise ZeroDivisionError("no such luck")
"""


def test_a_policy_that_raises_where_nobody_waits_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "raises_once.py").write_text(RAISES_ONCE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    given = {"scheduler.policy": "raises_once:Own"}
    requests = lorrery.Requests(at_seconds=[0.0, 1.0], prompt_tokens=[10, 10], output_tokens=[5, 5])
    for at, told in ((10**9, []), (3, ["policy raises_once:Own under lorrery.scheduler.core.batching.whole_prompts:"])):
        result = lorrery.simulate(None, requests, overrides={**given, "scheduler.policy_options.at": at}, workers=1)
        assert result.counts["num_completed"] == 2
        assert [warning[: len(what)] for warning, what in zip(result.warnings, told, strict=True)] == told
        assert all(
            "raised ZeroDivisionError: no such luck (1 x): what waited then has failed" in warning
            for warning in result.warnings
        )
