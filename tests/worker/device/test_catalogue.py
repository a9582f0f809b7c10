"""GPUs, models and engines by name, tables of one's own, and what fits."""

import math

import pytest

from lorrery.service.files.reading import read_tables
from lorrery.worker.device.catalogue.architecture import precision
from lorrery.worker.device.catalogue.hardware import CatalogueError, Price
from lorrery.worker.device.catalogue.tables import FORMAT, PACKAGE, Catalogue
from lorrery.worker.device.deployment import kv_bytes_per_token, kv_pool_tokens, weight_bytes
from tests.worker.device.known import CATALOGUE

SHIPPED = read_tables(PACKAGE)
OWN_FIT = {
    "gemm_flops": 0.7,
    "gemm_bandwidth": 0.9,
    "gemm_us": 4,
    "elementwise_bandwidth": 0.7,
    "elementwise_us": 2,
    "decode_bandwidth": 0.8,
    "prefill_flops": 0.5,
    "attention_us": 9,
}
OWN_GPU = {"name": "X1", "tflops": 100, "memory_gb": 10.5, "gb_per_second": 500, "num_sms": 50}
OWN_MODEL = {
    "name": "M", "num_layers": 2, "hidden": 64, "num_heads": 16, "num_kv_heads": 4, "head_size": 4, "ffn": 128,
    "vocabulary": 100,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "billions", "kv_bytes"),
    [
        ("Llama-2-7B", 6.74, 524_288),
        ("Llama-2-13B", 13.02, 819_200),
        ("Llama-2-70B", 68.98, 327_680),
        ("LLaMA-65B", 65.28, 2_621_440),
        ("Llama-3-8B", 8.03, 131_072),
        ("Llama-3-70B", 70.55, 327_680),
        ("Qwen2.5-7B", 7.62, 57_344),
        ("Qwen2.5-72B", 72.70, 327_680),
        ("Mistral-7B", 7.24, 131_072),
        ("Mixtral-8x7B", 46.70, 131_072),
        ("phi-2", 2.78, 327_680),
        ("CodeLlama-34B", 33.74, 196_608),
        ("internlm-20B", 20.09, 1_228_800),
        ("Qwen-72B", 72.28, 2_621_440),
        ("Qwen3-32B", 32.76, 262_144),
        ("BLOOM-176B", 176.23, 4_014_080),
    ],
)
def test_model_sizes_are_the_published_ones(name, billions, kv_bytes):
    model = CATALOGUE.model(name)
    assert round(model.num_parameters / 1e9, 2) == billions
    assert kv_bytes_per_token(model) == kv_bytes


def entries(kind: str) -> list[dict]:
    return [entry for _, table in SHIPPED for entry in table.get(kind, ())]


@pytest.mark.parametrize("entry", entries("model"), ids=lambda entry: entry["name"])
def test_every_model_has_the_parameters_it_is_known_by(entry):
    model = CATALOGUE.model(entry["name"])
    assert model.num_parameters / 1e9 == pytest.approx(entry["published_billions"], rel=0.02)


def test_every_entry_says_where_its_figures_are_from():
    names = [f"{kind} {entry['name']}" for kind in ("gpu", "model") for entry in entries(kind)]
    names += [
        f"{kind[:-1]} {name}"
        for _, table in SHIPPED
        for kind in ("fits", "links", "engines")
        for name in table.get(kind, ())
    ]
    assert len(names) == len(set(names)) > 80
    assert all(CATALOGUE.sources[name] for name in names)


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("a100", "A100-80-SXM"),
        ("h100", "H100-SXM"),
        ("rtx4090", "RTX-4090"),
        ("rtxpro6000", "RTX-PRO-6000"),
        ("NVIDIA-H200".removeprefix("NVIDIA-"), "H200-SXM"),
    ],
)
def test_gpus_are_known_by_the_names_of_profiles(asked, name):
    assert CATALOGUE.gpu(asked).name == name


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("Llama-3.1-8B", "Llama-3.1-8B"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "Llama-3-8B"),
        ("meta-llama/Llama-3.3-70B-Instruct", "Llama-3.1-70B"),
        ("meta-llama/Llama-3.1-70B-Instruct", "Llama-3.1-70B"),
        ("meta-llama/Llama-2-7b-chat-hf", "Llama-2-7B"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "Mixtral-8x7B"),
        ("CodeLlama-34b", "CodeLlama-34B"),
        ("internlm/internlm-20b", "internlm-20B"),
        ("huggyllama/llama-7b", "Llama-2-7B"),
        ("bloom-176b", "BLOOM-176B"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen3-30B-A3B"),
        ("Qwen/Qwen3-235B-A22B-Thinking-2507", "Qwen3-235B-A22B"),
        ("mistralai/Mistral-Large-Instruct-2411", "Mistral-Large-123B"),
    ],
)
def test_models_are_known_by_the_names_of_checkpoints(asked, name):
    assert CATALOGUE.model(asked).name == name


def test_unknown_names_are_answered_with_the_known_ones():
    with pytest.raises(CatalogueError, match=r"GPU 'A1' is not known \(nearest: A10\); known: .*A100-80-SXM"):
        CATALOGUE.gpu("A1")
    with pytest.raises(CatalogueError, match=r"model 'GPT' is not known \(nearest: GPT-3-175B\); known: Llama-2-7B, "):
        CATALOGUE.model("GPT")
    with pytest.raises(CatalogueError, match="engine 'fast' is not known; known: present-day, "):
        CATALOGUE.engine("fast")


def test_own_tables_add_and_replace():
    own = {
        "format": FORMAT,
        "gpu": [OWN_GPU, {**OWN_GPU, "name": "A40", "fit": "a40", "all_reduce": "dgx-a100"}],
        "links": {"pcie-4": {"us": 1, "gb_per_second": 2}},
    }
    catalogue = Catalogue([*SHIPPED, ("own.toml", own)])
    assert catalogue.gpu("x1").fit == catalogue.fits["default"]
    assert catalogue.gpu("x1").all_reduce.us == 1
    assert catalogue.gpu("A40").tflops == 100
    assert catalogue.gpu("A40").fit == CATALOGUE.gpu("A40").fit


def test_an_own_fit_or_link_changes_the_shipped_gpus_that_name_it():
    fits = {
        "h100": {**OWN_FIT, "gemm_us": 77.0},
        "h100-vllm": {**OWN_FIT, "gemm": {"fp8": {"us": 99.0}}},
    }
    links = {"dgx-h100": {"us": 7, "gb_per_second": 8}, "h100-graph": {"us": 3, "gb_per_second": {"2": 100, "8": 400}}}
    h100 = Catalogue([*SHIPPED, ("own.toml", {"format": FORMAT, "fits": fits, "links": links})]).gpu("H100")
    assert h100.fit.gemm_of("bf16").us == h100.fit.gemm_of("fp8").us == 77
    assert h100.modern_fit.gemm_of("fp8").us == 99
    assert h100.modern_fit.gemm_of("bf16").us == h100.modern_fit.gemm_of("fp8_block").us == 4
    assert h100.link(8).us == 7
    assert [h100.link(8, modern=True).bandwidth(gpus) for gpus in (2, 4, 8)] == [100, 100, 400]


def test_a_later_price_list_overrides_an_earlier_one_gpu_by_gpu():
    ours = {"source": "our contract", "date": "2026-11-28", "usd_per_hour": {"h100": 1.5, "X1": 0.25}}
    catalogue = Catalogue([*SHIPPED, ("own.toml", {"format": FORMAT, "gpu": [OWN_GPU], "prices": {"ours": ours}})])
    assert catalogue.price("H100-SXM") == Price(1.5, "our contract", "2026-11-28")
    assert catalogue.price("x1") == Price(0.25, "our contract", "2026-11-28")
    shipped = CATALOGUE.price("L40S")
    assert catalogue.price("L40S") == shipped
    assert shipped is not None
    assert CATALOGUE.price("GB300") is None
    assert all(gpu.watts for gpu in CATALOGUE.gpus.values())


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, r"own\.toml: format None is not known"),
        ({"format": FORMAT, "gpus": []}, r"own\.toml: gpus has no meaning here"),
        ({"format": FORMAT, "gpu": [{**OWN_GPU, "sms": 3}]}, r"own\.toml: gpu 'X1': sms has no meaning here"),
        ({"format": FORMAT, "gpu": [{"name": "X1"}]}, r"own\.toml: gpu 'X1': tflops is missing"),
        ({"format": FORMAT, "gpu": [{**OWN_GPU, "tflops": "9"}]}, r"gpu 'X1': tflops cannot be '9'"),
        ({"format": FORMAT, "gpu": [{**OWN_GPU, "num_sms": 1.5}]}, r"gpu 'X1': num_sms cannot be 1\.5"),
        ({"format": FORMAT, "gpu": [{**OWN_GPU, "fit": "z"}]}, r"gpu 'X1': fit 'z' is not known; known: default"),
        ({"format": FORMAT, "gpu": [{**OWN_GPU, "all_reduce": "z"}]}, r"gpu 'X1': all_reduce 'z' is not known"),
        ({"format": FORMAT, "gpu": [{"tflops": 1}]}, r"gpu None: "),
        ({"format": FORMAT, "model": [{"name": "M", "num_layers": 0}]}, r"model 'M': num_layers|model 'M': hidden"),
        ({"format": FORMAT, "engines": {"e": {"attention": "both"}}}, r"engines\.e: attention is 'both'"),
        ({"format": FORMAT, "fits": {"f": {"gemm_us": 3}}}, r"fits\.f: gemm_flops is missing"),
        (
            {"format": FORMAT, "fits": {"f": {**OWN_FIT, "gemm": {"fp4": {}}}}},
            r"fits\.f\.gemm: fp4 has no meaning here",
        ),
        ({"format": FORMAT, "fits": {"f": {**OWN_FIT, "gemm": {"bf16": 3}}}}, r"fits\.f\.gemm: bf16 cannot be 3"),
        ({"format": FORMAT, "fits": {"f": {**OWN_FIT, "gemm_flops": 0}}}, r"fits\.f\.gemm\.bf16: flops cannot be 0"),
        (
            {"format": FORMAT, "fits": {"f": {**OWN_FIT, "attention": {"fp8": {"overlap": 99.0}}}}},
            r"fits\.f\.attention\.fp8: overlap cannot be 99\.0",
        ),
        (
            {"format": FORMAT, "fits": {"f": {**OWN_FIT, "gpus": "H100"}}},
            r"fits\.f: gpus cannot be 'H100'; it must be a list",
        ),
        ({"format": FORMAT, "fits": {"f": {**OWN_FIT, "basis": "felt"}}}, r"fits\.f: basis is 'felt'; it may be"),
        ({"format": FORMAT, "links": {"l": {"us": 1, "gb_per_second": {"x": 1}}}}, r"gb_per_second\.x cannot be 1"),
        ({"format": FORMAT, "gpu": [{**OWN_GPU, "modern_fit": "z"}]}, r"gpu 'X1': modern_fit 'z' is not known"),
        ({"format": FORMAT, "engines": {"e": {"kernels": "new"}}}, r"engines\.e: kernels is 'new'; it may be"),
        *(
            ({"format": FORMAT, "gpu": [{**OWN_GPU, **wrong}]}, rf"^own\.toml: gpu 'X1': {message}")
            for wrong, message in (
                ({"gb_per_second": 1e-300}, r"gb_per_second cannot be 1e-300; it must be a number from 0\.001 to"),
                ({"tflops": math.inf}, r"tflops cannot be inf; it must be a number from 0\.001 to 1,000,000"),
                ({"pcie_gb_per_second": 0}, "pcie_gb_per_second cannot be 0; it must be a number from 0.001"),
                (
                    {"memory_gb": 48, "usable_memory_gb": 300},
                    r"usable_memory_gb cannot be 300; .* at most 1\.1 x",
                ),
                ({"num_sms": 10**30}, "num_sms cannot be 10*; it must be a whole number from 1 to 100,000,000"),
                ({"aliases": "X"}, "aliases cannot be 'X'; it must be a list of names"),
            )
        ),
        *(
            ({"format": FORMAT, "model": [{**OWN_MODEL, **wrong}]}, rf"^own\.toml: model 'M': {message}")
            for wrong, message in (
                (
                    {"num_experts": 2, "experts_per_token": 4},
                    "experts_per_token cannot be 4; .* num_experts, 2",
                ),
                ({"num_kv_heads": 32}, "num_kv_heads cannot be 32; it must divide num_heads, 16"),
                ({"num_kv_heads": 5}, "num_kv_heads cannot be 5; it must divide num_heads, 16"),
                ({"gated": 1}, "gated cannot be 1; it must be true or false"),
                ({"aliases": [1]}, "aliases cannot be .1.; it must be a list"),
            )
        ),
        ({"format": FORMAT, "gpu": 5}, r"own\.toml: gpu cannot be 5; entries begin with \[\[gpu\]\]"),
        ({"format": FORMAT, "model": {"name": "M"}}, r"own\.toml: model cannot be .*; entries begin with"),
        ({"format": FORMAT, "gpu": [OWN_GPU, OWN_GPU]}, r"own\.toml: gpu X1 is there twice; keep one"),
        ({"format": FORMAT, "fits": 3}, r"own\.toml: fits cannot be 3; it must be a table"),
        ({"format": FORMAT, "links": {"l": 3}}, r"own\.toml: links\.l cannot be 3; it must be a table"),
        (
            {"format": FORMAT, "prices": {"p": {"usd": 3}}},
            r"prices\.p: a list has source, date and a table usd_per_hour",
        ),
        ({"format": FORMAT, "prices": {"p": {"usd_per_hour": {}}}}, r"prices\.p: source and date must be texts"),
        (
            {"format": FORMAT, "prices": {"p": {"source": "", "date": "", "usd_per_hour": {"H100": -1}}}},
            r"prices\.p: usd_per_hour\.H100 cannot be -1; it must be a number from 0",
        ),
    ],
)
def test_a_table_that_cannot_be_is_refused_by_name(table, message):
    with pytest.raises(CatalogueError, match=message):
        Catalogue([*SHIPPED, ("own.toml", table)])


def test_pool_is_what_the_weights_leave():
    a100, llama = CATALOGUE.gpu("A100-80-SXM"), CATALOGUE.model("Llama-2-7B")
    assert kv_pool_tokens(a100, llama) == (72_000_000_000 - 2_000_000_000 - 2 * llama.num_parameters) // 524_288
    assert kv_pool_tokens(CATALOGUE.gpu("H100-SXM"), CATALOGUE.model("Llama-3-8B")) // 1000 == 411


def test_small_numbers_make_room():
    h100, llama = CATALOGUE.gpu("H100-SXM"), CATALOGUE.model("Llama-3-70B")
    assert weight_bytes(llama, precision("int4", "fp8")) < 0.3 * weight_bytes(llama)
    assert kv_pool_tokens(h100, llama, 1, precision("int4", "fp8")) > 150_000
    assert kv_bytes_per_token(llama, 1, precision("bfloat16", "fp8")) * 2 == kv_bytes_per_token(llama)
    with pytest.raises(CatalogueError, match="weight dtype 'int3' is not known; known: float16"):
        precision("int3", "fp8")
    with pytest.raises(CatalogueError, match="KV dtype 'int4' is not known; known: float16"):
        precision("fp8", "int4")


def test_kv_heads_are_held_more_than_once_on_more_gpus_than_heads():
    llama = CATALOGUE.model("Llama-3-8B")
    assert kv_bytes_per_token(llama, 16) == 2 * kv_bytes_per_token(llama, 8)


def test_what_does_not_fit_is_refused_with_the_sum():
    a100, llama = CATALOGUE.gpu("A100-80-SXM"), CATALOGUE.model("Llama-3-70B")
    with pytest.raises(CatalogueError, match=r"0\.9 x 80 GB x 1 - 2 GB x 1 - 141\.1 GB of weights = -71\.1 GB"):
        kv_pool_tokens(a100, llama)
    with pytest.raises(CatalogueError, match="does not fit on 2 x A100-80-SXM"):
        kv_pool_tokens(a100, llama, 2)
    assert kv_pool_tokens(a100, llama, 4) > 400_000
    with pytest.raises(CatalogueError, match=r"141\.1 GB of weights - 200\.0 GB of adapters = -61\.1 GB"):
        kv_pool_tokens(a100, llama, 4, adapter_bytes=200 * 10**9)


def test_kv_heads_that_cannot_be_shared_out_are_refused():
    with pytest.raises(CatalogueError, match="Phi-4 has 10 KV heads; tensor_parallel 4 must divide them"):
        kv_pool_tokens(CATALOGUE.gpu("H100"), CATALOGUE.model("Phi-4"), 4)
