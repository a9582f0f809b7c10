"""Engine presets: which values they give, what wins over them, and what is said of those that do not go together."""

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from lorrery.scheduler.messages import WorkerHello
from lorrery.scheduler.replicas import ReplicaFactory
from lorrery.service.errors import SettingsError
from lorrery.service.files.shipped import DEFAULT_SETTINGS
from lorrery.service.settings.cluster import Settings, changed, load
from lorrery.service.settings.presets import Served, preset_tables, presets
from lorrery.worker.build import device_of, read_catalogue

ENGINES = list(presets())
ALL = [version.name for versions in presets().values() for version in versions.values()]
GPUS = ("H100-SXM", "L40S", "RTX-4090")
H100 = ("worker.gpu=H100-SXM", "model=Llama-3.1-8B")


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LORRERY_CONFIG", raising=False)
    monkeypatch.delenv("LORRERY_ENGINE", raising=False)


def leaves(tables: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def test_every_preset_sets_the_same_keys_whatever_the_gpu():
    # Otherwise a preset that wins over another would leave some of the other's values.
    keys = {
        frozenset(leaves(preset_tables(name, Served(gpu, "Llama-3.1-8B"), {})))
        for name in ALL
        for gpu in ("T4", "L40S", "A100-80-SXM", "H100-SXM", "B200")
    }
    assert len(keys) == 1


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("gpu", ["L40S", "A100-80-SXM", "B200"])
def test_every_preset_makes_a_cluster_of_the_shipped_settings(name: str, gpu: str):
    settings = load(DEFAULT_SETTINGS, [f"engine={name}", f"worker.gpu={gpu}"])
    assert settings.scheduler.policy == ("fcfs_tail" if name == "sglang" else "fcfs")
    assert settings.scheduler.max_req_input_len == settings.scheduler.max_req_total_len - 1 == 8_191
    assert device_of(settings).pool_tokens > 0


@pytest.mark.parametrize("model", read_catalogue().models)
def test_every_model_says_how_long_a_request_may_be(model: str):
    assert load(None, ["engine=vllm", f"model={model}"]).scheduler.max_req_total_len >= 2048


def test_bare_name_is_the_newest_version_and_a_patch_its_release_line():
    for engine, versions in presets().items():
        newest = changed({}, {"engine": f"{engine}-{list(versions)[-1]}"})
        assert changed({}, {"engine": engine}).worker == newest.worker
    assert changed({}, {"engine": "vllm-0.12.0"}).worker == changed({}, {"engine": "vllm-0.12"}).worker


def test_the_longest_release_line_that_fits_a_version_is_taken():
    of = {version: changed({}, {"engine": f"sglang-{version}"}).scheduler.sglang for version in ("0.5.9", "0.5.23")}
    assert {version: rules.reserve_ignored_eos for version, rules in of.items()} == {"0.5.9": False, "0.5.23": True}


def test_vllm_hides_the_hosts_time_from_0_15_on_and_computes_adapters_at_all_projections():
    of = {version: changed({}, {"engine": f"vllm-{version}"}).worker for version in presets()["vllm"]}
    assert {version: worker.engine for version, worker in of.items()} == {
        "0.11": "vllm", "0.12": "vllm", "0.15": "vllm-async", "0.18": "vllm-async", "0.24": "vllm-async",
        "0.32": "vllm-async",
    }  # fmt: skip
    assert {worker.lora.projections for worker in of.values()} == {"all-linear"}
    assert changed({}, {"engine": "sglang"}).worker.lora.projections == "adapted"


def test_limits_of_vllm_depend_on_the_gpu_as_they_do_there():
    of = {
        gpu: (own.max_num_batched_tokens, own.max_num_seqs)
        for gpu in ("H100-SXM", "H200-SXM", "A100-80-SXM", "L40S")
        for own in (load(None, ["engine=vllm", f"worker.gpu={gpu}"]).scheduler,)
    }
    assert of == {
        "H100-SXM": (8192, 1024),
        "H200-SXM": (8192, 1024),
        "A100-80-SXM": (2048, 256),
        "L40S": (2048, 256),
    }


def test_sglangs_kernels_of_adapters_have_room_for_its_largest_graph():
    of = {
        gpu: (own.kernels, own.graph_sequences)
        for gpu in ("H100-SXM", "L40S", "A10G", "B200", "T4")
        for own in (load(None, ["engine=sglang", f"worker.gpu={gpu}"]).worker.lora,)
    }
    sequences = {"H100-SXM": 256, "L40S": 32, "A10G": 48, "B200": 512, "T4": 8}
    assert of == {gpu: ("segmented", number) for gpu, number in sequences.items()}
    changed_back = changed(load(None, [*H100, "engine=sglang"]), {"engine": "vllm"}).worker.lora
    assert (changed_back.kernels, changed_back.graph_sequences) == ("grouped", None)


def test_each_layer_wins_over_the_presets_of_those_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "cluster.toml"
    path.write_text('engine = "trtllm"\n[scheduler]\nmax_num_seqs = 7\nblock_size = 64\nmax_waiting_requests = 5\n')
    own = load(path, H100).scheduler
    assert (own.max_num_seqs, own.block_size, own.max_num_batched_tokens) == (7, 64, 8192)
    monkeypatch.setenv("LORRERY_ENGINE", "sglang")
    monkeypatch.setenv("LORRERY_SCHEDULER__BLOCK_SIZE", "8")
    own = load(path, H100).scheduler
    assert (own.batching, own.max_num_seqs, own.block_size) == ("sglang", 2048, 8)
    own = load(path, [*H100, "engine=vllm", "scheduler.max_num_seqs=9"]).scheduler
    assert (own.batching, own.max_num_seqs, own.block_size) == ("vllm", 9, 16)
    assert own.max_waiting_requests == 5, "no preset's matter"


def test_preset_takes_back_what_a_layer_before_has_set():
    settings = load(DEFAULT_SETTINGS, ["engine=vllm"])
    assert load(DEFAULT_SETTINGS).scheduler.batch_max_tokens is not None
    assert settings.scheduler.batch_max_tokens is None


def test_changed_gpu_or_engine_changes_what_a_preset_derives():
    settings = load(DEFAULT_SETTINGS, ["engine=vllm", "scheduler.max_num_seqs=3"])
    assert changed(settings, {"worker.gpu": "L40S"}).scheduler.max_num_batched_tokens == 2048
    assert changed(settings, {"model": "Llama-2-7B"}).scheduler.max_req_total_len == 4096
    assert changed(settings, {"engine": "sglang"}).scheduler.max_num_seqs == 2048
    again: Settings = pickle.loads(pickle.dumps(settings))
    assert again == settings
    assert changed(again, {"worker.gpu": "L40S"}).scheduler.max_num_seqs == 3


def test_each_group_of_a_fleet_has_what_depends_on_its_gpu():
    groups = [{"gpu": "B200"}, {"gpu": "L40S", "count": 2}]
    kinds = changed({}, {"engine": "sglang", "workers": groups}).kinds(3)
    assert [(kind.worker.gpu, kind.worker.activation_gb, count) for kind, count in kinds] == [
        ("B200", 27.4, 1),
        ("L40S", 7.1, 2),
    ]


def test_each_worker_of_a_fleet_has_the_limits_of_its_gpu():
    groups = [{"gpu": "H100-SXM"}, {"gpu": "L40S"}]

    def limits(**more: object) -> dict[str, tuple[int | None, int]]:
        settings = changed({}, {"engine": "vllm", "model": "Llama-3.1-8B", "workers": groups, **more})
        factory = ReplicaFactory(settings)
        hellos = (WorkerHello("w", gpu, settings.model, 1, 100_000, "roofline", needs_prompts=False) for gpu in GPUS)
        found = {hello.gpu: factory.replica_settings(hello) for hello in hellos}
        return {gpu: (one.max_num_batched_tokens, one.max_num_seqs) for gpu, one in found.items()}

    assert limits() == {"H100-SXM": (8192, 1024), "L40S": (2048, 256), "RTX-4090": (2048, 256)}
    assert limits(**{"scheduler.max_num_seqs": 7})["H100-SXM"] == (8192, 7)
    of_all = changed({}, {"engine": "vllm", "model": "Llama-3.1-8B", "workers": groups[:1]}).scheduler
    assert of_all.max_num_batched_tokens == 8192


def test_longest_request_follows_what_is_set_of_lengths_and_pool():
    def lengths(*overrides: str) -> tuple[int, int]:
        own = load(None, [*H100, "engine=vllm", *overrides]).scheduler
        return own.max_req_input_len, own.max_req_total_len

    assert lengths("scheduler.max_req_total_len=9000") == (8999, 9000)
    assert lengths("scheduler.max_req_input_len=500") == (500, 131_072)
    assert lengths("scheduler.max_total_token_num=20000") == (19_999, 20_000)


def test_model_that_does_not_say_needs_lengths(tmp_path: Path):
    path = tmp_path / "models.toml"
    path.write_text(
        'format = 1\n[[model]]\nname = "Own"\nnum_layers = 4\nhidden = 512\nnum_heads = 8\nnum_kv_heads = 8\n'
        "head_size = 64\nffn = 2048\nvocabulary = 1000\n"
    )
    own = ["engine=vllm", "model=Own", f"catalogue=['{path}']"]
    with pytest.raises(SettingsError, match=r"no max_model_len of Own: add it there, or set scheduler\.max_req_input"):
        load(None, own)
    lengths = ["scheduler.max_req_input_len=10", "scheduler.max_req_total_len=20"]
    assert load(None, [*own, *lengths]).scheduler.max_req_total_len == 20


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engine=vlm"], "engine: 'vlm' is not known; known: vllm, sglang, trtllm.*vllm-0.24.*--set"),
        (["engine=vllm-9"], "'vllm-9' is not known in that version; known: vllm-0.11"),
        (["engine=vllm-"], "known: vllm-0.11"),
        (["engine=vllm-0.1"], "known: vllm-0.11"),
        (["engine=3"], "engine: Input should be a valid string, got 3"),
        (["engine=vllm", "worker.gpu=abacus"], "GPU 'abacus' is not known"),
        (["engine=vllm", "scheduler.strict=true"], "strict keeps.*engine = 'vllm' sets scheduler.policy = 'fcfs'"),
        (["engine=vllm", "scheduler.batching=static"], "engine = 'vllm' sets scheduler.memory = 'on_demand'"),
        (["engine=sglang-0.5", "scheduler.policy=fcfs"], "'sglang-0.5' sets scheduler.batching = 'sglang'"),
        (
            ["engine=trtllm-1.2", "scheduler.batching=continuous"],
            "'trtllm-1.2' sets scheduler.max_num_batched_tokens = 8192; engine = 'trtllm-1.2' sets scheduler.max_req_",
        ),
    ],
)
def test_what_cannot_be_names_the_preset_and_the_setting(overrides: list[str], message: str):
    with pytest.raises(SettingsError, match=message):
        load(None, [*H100[1:], "worker.gpu=H100-SXM", *overrides])


def test_environment_that_names_no_engine_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LORRERY_ENGINE", "nope")
    with pytest.raises(SettingsError, match=r"'nope' is not known.*\(environment\)"):
        load()


@pytest.mark.parametrize(
    ("model", "longest"), [("Llama-3-8B", 8192), ("Llama-3.1-8B", 131072), ("Llama-3.3-70B", 131072)]
)
def test_the_longest_request_is_that_of_the_checkpoint(model, longest):
    own = changed({}, {"engine": "vllm", "model": model, "worker": {"gpu": "H200-SXM", "tensor_parallel": 2}}).scheduler
    assert (own.max_req_total_len, own.max_req_input_len) == (longest, longest - 1)
