"""From settings to what the mock GPU is."""

from pathlib import Path

import pytest

from lorrery.service.errors import SettingsError
from lorrery.service.settings.cluster import Settings, load
from lorrery.worker.build import deployment_of, device_of
from lorrery.worker.device.lora import LoraKernels
from lorrery.worker.device.steptime import STEP_TIME_MODELS

PROFILE = """gpu,model,tp,phase,batch_size,kv_len,prefill_chunk,step_ms,quality
a100,llama-2-7b,1,decode,1,100,,10,ok
a100,llama-2-7b,1,prefill,,,100,20,ok
a100,llama-2-7b,1,prefill,,,200,25,suspect
a100,llama-2-7b,2,decode,1,100,,6,ok
h100,llama-2-7b,1,decode,1,100,,7,ok
nobodys,llama-2-7b,1,decode,1,100,,7,ok
,,1,decode,8,100,,12,ok
"""


def settings(*overrides: str) -> Settings:
    return load(None, overrides)


def test_defaults_are_sixteen_bits_and_an_engine_of_today():
    deployment = deployment_of(settings())
    assert (deployment.gpu.name, deployment.model.name) == ("A100-80-SXM", "Llama-2-7B")
    assert deployment.engine.name == "present-day"
    assert deployment.fit == deployment.gpu.modern_fit != deployment.gpu.fit
    assert (deployment.precision.weight_bytes, deployment.precision.kv_bytes) == (2, 2)


def test_every_way_to_compute_adapters_can_be_set():
    deployment = deployment_of(
        settings(
            "adapters.max_lora_rank=128",
            "adapters.target_modules=all-linear",
            "worker.lora.padding=max_lora_rank",
            "worker.lora.launch_us=1.5",
            "worker.lora.sharded=true",
            "worker.lora.kernels=grouped",
            "adapters.max_loras=8",
        )
    )
    assert deployment.lora == LoraKernels("all-linear", 128, 1.5, sharded=True, kernels="grouped", places=8)


def test_segmented_kernels_have_room_for_graphs_of_decodes_and_of_prefills():
    own = ["worker.lora.kernels=segmented", "adapters.max_lora_rank=32", "adapters.max_loras=8"]
    assert deployment_of(settings(*own)).lora == LoraKernels(kernels="segmented", places=8, pool_rank=32)
    graphs = [*own, "worker.lora.graph_sequences=256"]
    assert deployment_of(settings(*graphs)).lora == LoraKernels(
        kernels="segmented", places=8, pool_rank=32, decode_slots=256, prefill_slots=520
    )
    chunks = deployment_of(settings(*graphs, "scheduler.max_num_batched_tokens=4096")).lora
    assert (chunks.decode_slots, chunks.prefill_slots) == (256, 264)
    eager = LoraKernels(kernels="segmented", places=8, pool_rank=32, graphs=False)
    assert deployment_of(settings(*graphs, "worker.enforce_eager=true")).lora == eager


def test_a_profile_serves_the_rows_of_this_deployment(tmp_path: Path):
    path = tmp_path / "profile.csv"
    path.write_text(PROFILE)
    deployment = deployment_of(settings("worker.step_time=table", f"worker.profile={path}"))
    assert [row.step_ms for row in deployment.profile] == [10, 20, 12]
    assert STEP_TIME_MODELS["table"](deployment).name == "table"


def test_a_profile_of_the_same_shapes_serves_a_model_with_longer_contexts(tmp_path: Path):
    path = tmp_path / "profile.csv"
    path.write_text(PROFILE.replace("llama-2-7b", "llama-3-8b"))
    for model in ("Llama-3-8B", "Llama-3.1-8B"):
        deployment = deployment_of(settings("worker.step_time=table", f"worker.profile={path}", f"model={model}"))
        assert [row.step_ms for row in deployment.profile] == [10, 20, 12]


def test_a_log_of_steps_is_what_the_fitted_model_reads(tmp_path: Path):
    path = tmp_path / "steps.csv"
    path.write_text("step_s,prefill_tokens,decode_seqs\n0.01,0,1\n0.02,100,0\n")
    deployment = deployment_of(settings("worker.step_time=fitted", f"worker.profile={path}"))
    assert len(deployment.steps) == 2
    assert STEP_TIME_MODELS["fitted"](deployment).name == "fitted"
    path.write_text("step_s,prefill_tokens,decode_seqs,decode_kv_tokens\n0.01,0,1,9\n0.02,100,0,0\n")
    with pytest.raises(SettingsError, match=r"^worker\.profile = '.*steps\.csv': .* too few .*: 1 row for 2 figures"):
        device_of(settings("worker.step_time=fitted", f"worker.profile={path}"))
    path.write_text("step_s,prefill_tokens,decode_seqs\n0.01,0,x\n")
    with pytest.raises(SettingsError, match=r"steps\.csv: line 2: decode_seqs is 'x'"):
        deployment_of(settings("worker.step_time=fitted", f"worker.profile={path}"))
    path.write_text("step_s,prefill_tokens,decode_seqs\n0.01,0,1\n")
    with pytest.raises(SettingsError, match=r"^worker\.profile = '.*steps\.csv': has no step with prefill"):
        deployment_of(settings("worker.step_time=fitted", f"worker.profile={path}"))


def test_engine_of_2023_is_the_one_measured_on_this_gpu():
    assert deployment_of(settings("worker.engine=vllm-2023", "worker.gpu=h100")).engine.name == "vllm-2023-h100"
    assert deployment_of(settings("worker.engine=vllm-2023", "worker.gpu=l40s")).engine.name == "vllm-2023"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("worker.engine=fast", "engine 'fast' is not known"),
        ("worker.profile=none.csv", "none.csv: .*No such file"),
        ("worker.step_time=table", "needs profile"),
        ("worker.step_time=fitted", "needs profile"),
        ("worker.weight_dtype=int3", "worker.weight_dtype"),
        ("worker.moe_backend=marlin", "worker.moe_backend = 'marlin' with weight_dtype = 'bfloat16'"),
        ('catalogue=["none.toml"]', r"none\.toml: No such file"),
    ],
)
def test_what_cannot_be_is_refused_by_name(override: str, message: str):
    with pytest.raises(SettingsError, match=message):
        deployment_of(settings(override))
