"""`lorrery plan --rate`: the cheapest cluster, what it says of it, curves, and what it refuses."""

import json
import re
import shlex

import pytest
from typer.testing import CliRunner

from lorrery.cli.simulate import app as simulate
from lorrery.service.errors import SettingsError
from tests.cli.test_plan import LLAMA_8B, SMALL, plan, read_report


@pytest.fixture(autouse=True)
def _no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # which pytest-xdist sets


LEVEL = ["--slo", "ttft_p99=1", "--slo", "tpot_p99=0.02"]


@pytest.mark.parametrize(("gpu", "rate"), [("H100", 40), ("A100", 60), ("H100", 0.5)])
def test_as_many_replicas_are_asked_for_as_the_simulator_needs(tmp_path, gpu, rate):
    path = tmp_path / "plan.json"
    model = ["--model", "Llama-3-8B", "--gpu", gpu, "--tp", "1", "--set", "scheduler.running_max_req_size=64"]
    work = ["--prompt", "300", "--output", "60", *LEVEL, "--rate", str(rate), "--requests", "1500", "--seeds", "1"]
    output = plan(*model, *work, "-j", "1", "--json", str(path))
    found = json.loads(path.read_text())["search"]
    num_replicas, command = found["replicas"], found["command"]
    assert f"{num_replicas} replica{'s' if num_replicas > 1 else ''} of 1 x {gpu}" in output
    assert command in output

    def keeps_the_level(workers: int) -> bool:
        out = tmp_path / str(workers)
        arguments = shlex.split(command)
        assert arguments[:2] == ["lorrery", "simulate"]
        assert arguments[-2:] == ["--workers", str(num_replicas)]
        result = CliRunner().invoke(simulate, [*arguments[2:-1], str(workers), "--out", str(out)])
        summary = read_report(out)["summary"]
        ttft, tpot = summary["from_intended"]["ttft_ms"]["p99"] / 1e3, summary["tpot_ms"]["p99"] / 1e3
        return result.exit_code == 0 and ttft <= 1 and tpot <= 0.02

    assert keeps_the_level(num_replicas)
    assert num_replicas == 1 or not keeps_the_level(num_replicas - 1)


def test_a_level_that_waiting_breaks_at_any_size_is_told():
    asked = ["--slo", "ttft_p99=0.0395", "--rate", "60", "--requests", "200", "--tp", "1", "-j", "1"]
    output = plan(*LLAMA_8B, *asked, exit_code=1)
    assert "60 requests/s: no cluster that was tried keeps TTFT p99 0.0395 s" in output


def test_a_fault_of_every_request_is_named_after_one_run(tmp_path):
    path = tmp_path / "plan.json"
    queue = ["--set", "scheduler.policy=tests.simulator.faulty_queues:AnswersNone", "--tp", "1", "-j", "1"]
    output = plan(*SMALL, *queue, "--rate", "5", "--requests", "100", "--json", str(path), exit_code=1)
    said = " ".join(output.split())
    assert "5 requests/s: every request fails, on any number of replicas: policy" in said
    assert "it must be a list, [] if no request is dropped" in said
    assert json.loads(path.read_text())["search"]["num_trials"] == 1


def test_replicas_are_counted_without_an_autoscaler(tmp_path):
    path, file = tmp_path / "plan.json", tmp_path / "scaled.toml"
    file.write_text('model = "Llama-3-8B"\n[worker]\ngpu = "H100"\n[autoscaler]\nenabled = true\nmax_replicas = 2\n')
    work = ["--prompt", "300", "--output", "60", "--set", "scheduler.running_max_req_size=8", "--tp", "1", "-j", "1"]
    asked = ["--rate", "60", "--requests", "400", "--seeds", "1", "--json", str(path)]
    output = " ".join(plan("--config", str(file), *work, "--set", "autoscaler.target=2", *asked).split())
    assert "replicas are counted without the autoscaler: each run has a fixed number of them" in output
    found = json.loads(path.read_text())["search"]
    assert found["replicas"] > 2
    assert "--set autoscaler.enabled=false" in found["command"]
    assert "autoscaler.target" not in found["command"]
    assert CliRunner().invoke(simulate, [*shlex.split(found["command"])[2:], "--out", str(tmp_path)]).exit_code == 0
    assert "autoscaler" not in plan(*SMALL, "--tp", "1", "-j", "1", *asked)
    assert json.loads(path.read_text())["search"]["proofs"] == found["proofs"]


def test_nothing_is_simulated_where_one_stream_alone_misses_the_level():
    output = plan(*LLAMA_8B, "--slo", "tpot_p99=0.001", "--rate", "5", exit_code=1)
    assert "a stream alone takes 8.1 ms per token" in output
    assert "simulat" not in output


def test_adapters_of_a_plan_are_simulated_too(tmp_path):
    path = tmp_path / "plan.json"
    asked = ["--adapters", "5", "--rank", "8,64", "--tp", "1", "--rate", "20", "--requests", "200", "--seeds", "1"]
    plan(*SMALL, *asked, "-j", "1", "--json", str(path))
    command = json.loads(path.read_text())["search"]["command"]
    assert "plan-r8" in command
    assert CliRunner().invoke(simulate, [*shlex.split(command)[2:], "--out", str(tmp_path)]).exit_code == 0
    named = {adapter["adapter_id"] for adapter in read_report(tmp_path)["summary"]["adapters"]}
    assert named == {"plan-r8-0", "plan-r8-1", "plan-r8-2", "plan-r64-0", "plan-r64-1"}


def test_settings_that_are_given_are_not_searched_over(tmp_path):
    path, file = tmp_path / "plan.json", tmp_path / "own.toml"
    file.write_text('model = "Llama-3-8B"\n[worker]\ngpu = "H100"\ntensor_parallel = 2\n')
    asked = [
        "--config",
        str(file),
        "--engine",
        "vllm",
        "--adapters",
        "4",
        "--prompt",
        "300",
        "--output",
        "60",
        "-j",
        "1",
    ]
    own = ["--set", "scheduler.placement=round_robin", "--search", "adapters.max_loras=2,4"]
    plan(*asked, *own, "--rate", "5", "--requests", "100", "--seeds", "1", "--json", str(path))
    found = json.loads(path.read_text())["search"]
    tried = {tuple(found["changes"]), *(tuple(one["changes"]) for one in found["rejected"])}
    assert tried == {("adapters.max_loras=2",), ("adapters.max_loras=4",)}
    with pytest.raises(SettingsError, match=r"--search worker\.gpu: there is an option for it too"):
        plan(*LLAMA_8B, "--search", "worker.gpu=H100,A100", "--rate", "1")


def test_an_interrupt_gives_the_best_so_far(monkeypatch: pytest.MonkeyPatch):
    def prove(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lorrery.simulator.plan.search._Search.prove", prove)
    output = plan(*SMALL, "--rate", "5", "--requests", "100", "-j", "1", exit_code=130)
    assert "interrupted; the best so far, not proven: 1 replica of 1 x H100-SXM, tensor" not in output
    assert "interrupted; the best so far, not proven: 1 replica of 1 x H100-SXM: 1 GPU, $2.69/h" in output


LORA = [*SMALL, "--adapters", "8", "--rate", "6", "--requests", "200", "--seeds", "1", "--jobs", "1", "--tp", "1"]


def test_a_curve_answers_each_value_and_says_what_one_more_adapter_costs(tmp_path):
    output = plan(*LORA, "--curve", "adapters=4,16", "--json", str(tmp_path / "plan.json"))
    curve = json.loads((tmp_path / "plan.json").read_text())["curve"]
    assert list(curve) == ["4", "16"]
    few, many = (one["usd_per_hour"] for one in curve.values())
    assert "$/h for one more" in output
    assert f"{(many - few) / 12:,.3f}" in output
    slots = plan(*LORA, "--curve", "adapters.max_loras=1,8", "--json", str(tmp_path / "plan.json"))
    curve = json.loads((tmp_path / "plan.json").read_text())["curve"]
    assert [one["changes"][-2] for one in curve.values()] == ["adapters.max_loras=1", "adapters.max_loras=8"]
    assert re.search(r"^ +1  .*\n +8  ", slots, re.MULTILINE)


def test_the_answer_says_how_many_tenants_more_it_has_room_for(tmp_path):
    output = plan(*LORA, "--json", str(tmp_path / "plan.json"))
    found = json.loads((tmp_path / "plan.json").read_text())["search"]
    more = found["tenants"]["held"] - 8
    assert re.search(rf"room for (at least )?{more} more of such tenants|no room for more of such", output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--curve", "adapters=few"], "--curve adapters: few is not a number"),
        (["--curve", "adapters=0", "--curve", "rate=2"], "--curve adapters and rate: a curve is over one of them"),
        (["--curve", "scheduler.speed=1"], "no such setting"),
        (["--curve", "rate=1", "--page", "x.html"], "leave out --curve"),
        (["--drift", "sideways"], "--drift sideways: expected"),
        (["--plot", "x.png"], "--page FILE has a plot"),
    ],
)
def test_what_cannot_be_asked_of_a_rate_is_refused(arguments, message):
    with pytest.raises(SettingsError, match=message):
        plan(*LORA, *arguments)


def test_adapters_whose_popularity_shifts_are_served_worse():
    late = (
        "--slo",
        "ttft_p99=9",
        "--set",
        "adapters.max_loras=2",
        "--adapter-exponent",
        "2",
        "--search",
        "scheduler.placement=least_loaded",
    )
    still = plan(*LORA, *late)
    shifting = plan(*LORA, *late, "--drift", "shift,every=2")
    assert still != shifting
    assert "--drift shift,every=2" in shifting


def test_an_interrupt_before_any_run_is_told_and_written(monkeypatch: pytest.MonkeyPatch, tmp_path):
    def screen(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lorrery.simulator.plan.search._Search.screen", screen)
    path = tmp_path / "plan.json"
    output = plan(*SMALL, "--rate", "5", "--requests", "100", "-j", "1", "--json", str(path), exit_code=130)
    assert "interrupted before a cluster that keeps the level was found" in output
    assert json.loads(path.read_text())["search"]["finished"] is False
