"""`lorrery.plan`: the figures of the command, as numbers."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import lorrery
from lorrery.cli.plan import app
from lorrery.service.errors import SettingsError
from lorrery.service.settings.cluster import changed
from lorrery.simulator.plan.level import level_of
from lorrery.simulator.plan.shapes import capacity_of
from lorrery.simulator.plan.trials import stream
from lorrery.worker.build import device_of
from lorrery.worker.device.capacity import Workload
from lorrery.worker.device.deployment import kv_bytes_per_token
from lorrery.worker.device.lora import place_bytes

CLUSTER = {"model": "Llama-2-7B", "worker": {"gpu": "A10G"}}


def test_it_has_the_figures_of_the_command(tmp_path: Path):
    asked = "--model Llama-2-7B --gpu A10G --prompt 300 --output 100 --adapters 4 --rank 8,16 --concurrency 1,4"
    done = CliRunner().invoke(app, [*asked.split(), "--json", str(tmp_path / "plan.json")])
    assert done.exit_code == 0, done.output
    (shown,) = json.loads((tmp_path / "plan.json").read_text())["plans"]
    plan = lorrery.plan(
        overrides={"model": "Llama-2-7B", "worker.gpu": "A10G"},
        prompt_tokens=300,
        output_tokens=100,
        adapters=4,
        ranks=(8, 16),
        concurrency=(1, 4),
    )
    assert plan.name == shown["deployment"]
    assert plan.capacity.kv_pool_tokens == shown["kv_pool_tokens"]
    assert plan.columns["concurrency"].tolist() == [1, 4]
    for name in ("itl", "tpot", "total_tokens"):
        np.testing.assert_allclose(plan.columns[name], [point[name] for point in shown["points"]], rtol=1e-12)


def test_a_rate_is_served_by_the_fewest_replicas_that_keep_the_level():
    level = {"ttft_p99": 1.0, "tpot_p99": 0.1}
    asked = {"prompt_tokens": 200, "output_tokens": 20, "rate": 30, "num_requests": 300, "slo": level, "seeds": 2}
    plan = lorrery.plan(CLUSTER, **asked, overrides={"worker.tensor_parallel": 1})
    missed, met = plan.search.answer.proofs
    assert (missed.met, met.met) == (False, True)
    assert (missed.num_replicas + 1, met.num_replicas) == (plan.num_replicas, plan.num_replicas)
    assert met.means["ttft_p99"] <= 1.0 < missed.means["ttft_p99"] or missed.means["tpot_p99"] > 0.1


def test_only_bounds_that_are_asked_for_bind():
    asked = {"prompt_tokens": 200, "output_tokens": 20, "rate": 30, "num_requests": 300, "seeds": 1}
    one_gpu = {"overrides": {"worker.tensor_parallel": 1}}
    strict, loose = (
        lorrery.plan(CLUSTER, **asked, **one_gpu, slo=slo).num_replicas
        for slo in ({"ttft_p99": 0.5, "tpot_p99": 0.1}, {"goodput": 0.5, "e2e_mean": 60.0})
    )
    assert loose < strict


FLEET = {"model": "Llama-3-8B", "workers": [{"gpu": "L4"}, {"gpu": "L40S", "kv_dtype": "fp8"}]}


def test_workers_of_one_kind_are_those_that_are_planned():
    work = {"prompt_tokens": 260, "output_tokens": 60, "concurrency": [2], "slo": {"e2e_mean": 99.0}}
    alone = lorrery.plan({"model": "Llama-3-8B", "worker": {"gpu": "L40S"}}, **work)
    groups = [{"gpu": "L40S", "gpus": 2}, {"gpu": "l40s", "count": 3}]
    plan = lorrery.plan({"model": "Llama-3-8B", "workers": groups}, **work)
    assert (plan.name, plan.points) == (alone.name, alone.points)


def test_of_several_kinds_of_worker_the_caller_names_the_group():
    with pytest.raises(lorrery.SettingsError) as refused:
        lorrery.plan(FLEET)
    assert str(refused.value) == (
        "[[workers]] has 2 kinds of worker (1 x L4 in group 0, 1 x L40S in group 1), and a plan is for one: name its"
        " group, as with overrides={'worker.group': 0}"
    )
    plans = [lorrery.plan(FLEET, overrides={"worker.group": group}, concurrency=[1]) for group in (0, 1)]
    assert [plan.name for plan in plans] == ["Llama-3-8B on 1 x L4", "Llama-3-8B on 1 x L40S"]
    l40s = {"gpu": "L40S", "kv_dtype": "fp8"}
    assert plans[1].points == lorrery.plan({"model": "Llama-3-8B", "worker": l40s}, concurrency=[1]).points


def test_a_deployment_that_does_not_fit_says_so():
    plan = lorrery.plan({"model": "Llama-3-70B", "worker": {"gpu": "A10G"}})
    assert "A10G" in plan.refused
    assert plan.columns["concurrency"].tolist() == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens is 0; it must be a whole number, 1 or more"),
        ({"prompt_tokens": 1.5}, "prompt_tokens is 1.5; it must be a whole number"),
        ({"prompt_tokens": True}, "prompt_tokens is True; it must be a whole number"),
        ({"prompt_tokens": "100"}, "prompt_tokens is '100'; it must be a whole number"),
        ({"prompt_tokens": (9, 3)}, r"prompt_tokens is \(9, 3\); the first number must not be above the second"),
        ({"output_tokens": 1}, "output_tokens is 1; it must be a whole number, 2 or more"),
        ({"adapters": -1}, "adapters is -1; it must be a whole number, 0 or more"),
        ({"ranks": ()}, "ranks is empty; it must have at least one whole number, 1 or more"),
        ({"ranks": 16}, r"ranks is 16; expected a list, such as \[8, 16\]"),
        ({"ranks": "16"}, "ranks is '16'; expected a list"),
        ({"ranks": (8, 2.5)}, r"ranks\[1\] is 2.5; it must be a whole number"),
        ({"slo": {"ttft_p99": "1"}}, "slo ttft_p99 is '1'; it must be a number"),
        ({"slo": {"tpot_mean": -1}}, "slo tpot_mean is -1; it must be more than 0"),
        ({"slo": {"itl_p99": 1}}, "slo: 'itl_p99' is not known; known: ttft, tpot, e2e with _mean or"),
        ({"slo": "ttft_p99=1"}, "slo is 'ttft_p99=1'; expected a mapping"),
        ({"search": {"adapters.max_loras": 8}}, "search is .*; expected lists, such as"),
        ({"rate": 0}, "rate is 0; it must be more than 0, and finite"),
        ({"rate": True}, "rate is True; it must be a number"),
        ({"rate": 10**400}, "rate is inf; it must be more than 0, and finite"),
        ({"rate": 1, "num_requests": 1}, "num_requests is 1; it must be a whole number, 100 or more"),
        ({"concurrency": (0,)}, r"concurrency\[0\] is 0; it must be a whole number, 1 or more"),
        ({"concurrency": []}, "concurrency is empty"),
        ({"claim": (3500, 1, 300)}, "claim is .*; it must be a lorrery.Claim"),
        ({"claim": lorrery.Claim(3500, 1, 0)}, "claim.tokens_per_second is 0; it must be more than 0"),
        ({"overrides": "a=b"}, "overrides is 'a=b'; expected a list"),
    ],
)
def test_figures_that_cannot_be_are_refused(wrong: dict, message: str):
    with pytest.raises(lorrery.SettingsError, match=message):
        lorrery.plan(CLUSTER, **wrong)


def test_numbers_of_numpy_are_numbers():
    given = {
        "prompt_tokens": np.int64(300),
        "ranks": np.array([8, 16]),
        "slo": {"ttft_p99": np.float32(1)},
        "adapters": np.uint8(4),
    }
    plan = lorrery.plan(CLUSTER, output_tokens=np.int32(50), concurrency=np.array([1, 4]), **given)
    same = lorrery.plan(
        CLUSTER,
        prompt_tokens=300,
        output_tokens=50,
        ranks=[8, 16],
        adapters=4,
        concurrency=[1, 4],
        slo={"ttft_p99": 1.0},
    )
    assert plan.points == same.points
    assert type(plan.capacity.workload.prompt[0]) is int


@pytest.mark.parametrize("overrides", [{"scheduler.policy": "fcfs"}, ["scheduler.policy=fcfs"]])
def test_the_most_streams_of_a_replica_can_be_given(overrides: dict | list):
    made = lorrery.plan(CLUSTER, max_concurrency=3, overrides=overrides)
    assert [point.concurrency for point in made.points] == [1, 2, 3]
    assert made.held_back_by in ("--max-concurrency", "the level")
    with pytest.raises(TypeError, match=r"plan\(\) got an unexpected keyword argument 'most'"):
        lorrery.plan(CLUSTER, most=3)


def test_a_plan_travels_between_processes():
    work = {"prompt_tokens": 100, "output_tokens": 20, "adapters": 2, "claim": lorrery.Claim(100, 1.0, 50.0)}
    made = lorrery.plan({"worker": {"gpu": "A10G"}, "model": "Llama-2-7B"}, **work)
    came = pickle.loads(pickle.dumps(made))
    assert came.columns.keys() == made.columns.keys()
    assert came == made
    assert came.capacity is not None
    assert made.capacity is not None
    assert came.capacity.itl(3) == made.capacity.itl(3)
    refused = lorrery.plan({"worker": {"gpu": "A10G"}, "model": "Llama-2-70B"})
    assert pickle.loads(pickle.dumps(refused)) == refused != made


@pytest.mark.parametrize("tensor_parallel", [1, 2, 4, 8])
@pytest.mark.parametrize("model", ["Llama-3.1-8B", "Qwen3-30B-A3B"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_places_for_adapters_are_set_aside_alike_by_plan_and_worker(engine: str, model: str, tensor_parallel: int):
    own = {"engine": engine, "model": model, "worker.gpu": "H100-SXM", "worker.tensor_parallel": tensor_parallel}
    own["adapters.max_loras"] = 4
    registry = [{"id": "a", "rank": 8, "count": 9}]
    planned = capacity_of(
        changed({}, {**own, "adapters.registry": registry}), Workload((100, 100), (100, 100), 9, (8,))
    )
    device, without = (device_of(changed({}, {**own, "adapters.registry": one})) for one in (registry, []))
    known = device.deployment
    targets, rank = ("all-linear", 16) if engine == "vllm" else ("qkvo", 8)
    places = 4 * place_bytes(known.model, rank, targets, tensor_parallel)
    per_token = kv_bytes_per_token(known.model, tensor_parallel)
    assert planned.adapter_bytes == places
    assert planned.kv_pool_tokens == device.pool_tokens
    assert abs(without.pool_tokens - device.pool_tokens - places / per_token) < 1
    later = changed({}, {**own, "adapters.enable_lora": True, "adapters.max_lora_rank": rank})
    assert device_of(later).pool_tokens == device.pool_tokens


def test_a_place_of_vllms_is_as_large_as_computed_by_hand():
    # Llama-2-7B: 32 places x 32 layers x 2 bytes x rank 64 x (4 x 8192 + 3 x 15104) elements: 10.2 GB
    own = {"engine": "vllm", "model": "Llama-2-7B", "worker.gpu": "A100-40-SXM"}
    own |= {"adapters.max_loras": 32, "adapters.max_lora_rank": 64, "worker.activation_gb": 2.0}
    plan = lorrery.plan(overrides=own, prompt_tokens=100, output_tokens=100, adapters=32, ranks=(8,))
    assert (plan.capacity.adapter_bytes, plan.capacity.kv_pool_tokens) == (10_234_101_760, 23_574)


def test_a_registry_of_larger_ranks_raises_vllms_largest():
    own = {"engine": "vllm", "adapters.registry": [{"id": "a", "rank": 8, "count": 2}, {"id": "b", "rank": 40}]}
    assert changed({}, {"engine": "vllm"}).adapters.max_lora_rank == 16
    assert changed({}, own).adapters.max_lora_rank == 64
    with pytest.raises(SettingsError, match="adapter 'b' has rank 40; max_lora_rank is 32: raise it"):
        changed({}, {**own, "adapters.max_lora_rank": 32})


@pytest.mark.parametrize("overrides", [{"adapters.max_lora_rank": 16}, ["adapters.max_lora_rank=16"]])
def test_a_plan_from_python_is_checked_with_its_own_adapters(overrides: object) -> None:
    made = lorrery.plan(
        {"engine": "vllm", "adapters": {"registry": [{"id": "a", "rank": 32}]}}, adapters=2, overrides=overrides
    )
    assert made.capacity is not None


@pytest.mark.parametrize("slots", [8, 60])
def test_streams_over_many_adapters_have_the_simulators_times(slots: int):
    registry = {"adapters.registry": [{"id": "a", "rank": 16, "count": 60}], "adapters.max_loras": slots}
    settings = changed({"engine": "vllm", "model": "Llama-3.1-70B", "worker": {"gpu": "H100-SXM"}}, registry)
    settings = changed(settings, {"worker.tensor_parallel": 4})
    work = Workload((1500, 2000), (250, 750), 60)
    found = stream(settings, work, 128, level_of(()), [f"a-{number}" for number in range(60)])
    load = {"concurrency": 128, "num_requests": 1900, "input_range": "1500:2000", "output_range": "250:750"}
    columns = lorrery.simulate(settings, {**load, "num_adapters": 60, "adapter_exponent": 0}, workers=1).columns
    steady = np.argsort(columns.arrival_seconds)[4 * 128 : -128]
    for name in ("ttft", "tpot", "e2e"):
        simulated = getattr(columns, f"{name}_seconds")[steady].mean()
        assert getattr(found, name) == pytest.approx(simulated, rel=0.05), name
