"""The basis of a deployment's figures: measured, fitted to measurements of that GPU, or assumed to hold for it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from lorrery.worker.device.catalogue.hardware import MARLIN, SIXTEEN, AllReduce, Basis, Gpu
from lorrery.worker.device.deployment import KERNELS_ONLY, Deployment, Engine
from lorrery.worker.device.kernels import compute_type
from lorrery.worker.device.moe import expert_type, slow_type

FORMULAS = ("roofline", "naive-roofline")
"""Step-time models made of kernels; the others have their own basis."""
_WORDS = {
    "name", "source", "basis", "gpus", "kernels", "memory", "memory_share_of", "attention", "head", "separate_add",
    "fp8_experts", "most_sequences",
}  # fmt: skip
"""Fields of an engine that are not figures."""
_LORA_PARTS = {"grouped": "lora", "segmented": "lora_segmented"}
"""Measured kernels of adapters -> their part of a fit."""
_MISSING = "no measurement of "


@dataclass(frozen=True, slots=True)
class Ground:
    """Basis of one figure.

    Attributes:
        part: a part of a step's time, or the setting whose value it is.
        basis: measured, fitted or assumed.
        why: the source, or what is assumed.
    """

    part: str
    basis: Basis
    why: str


def no_measurement(gpu: Gpu, *, modern: bool = True) -> str | None:
    """Describe whose constants stand in for a GPU's unmeasured kernels; None if they were measured."""
    fit, name = gpu.kernels(modern=modern), gpu.modern_fit_name if modern else gpu.fit_name
    if fit.basis != "assumed" and (not fit.gpus or gpu.name in fit.gpus):
        return None
    whose = f"those of {', '.join(fit.gpus)}" if fit.gpus else fit.source or f"the fit {name!r}"
    return f"no measurement of {gpu.name}: its data sheet with assumed constants ({whose})"


def kernel_ground(gpu: Gpu, part: str, type_: str, *, modern: bool = True) -> Ground:
    """Return the basis of one kind of kernel.

    Args:
        gpu: that runs it.
        part: `gemm`, `attention`, `moe`, `lora`, `lora_segmented` or `elementwise`.
        type_: of the weights, or the integer type if they are unpacked; for attention, of the KV cache.
        modern: whether it is a present-day engine's kernel or an older one's.
    """
    fit = gpu.kernels(modern=modern)
    if (missing := no_measurement(gpu, modern=modern)) is not None:
        return Ground(part, "assumed", missing)
    if part in fit.assumed or f"{part}.{type_}" in fit.assumed:
        return Ground(part, "assumed", f"no measurement of {part} kernels")
    by_type: dict[str, Mapping[str, object]] = {"gemm": fit.gemm, "attention": fit.attention, "moe": fit.moe}
    if part == "moe" and not fit.moe:
        return Ground(part, "assumed", "no measurement of experts: computed as matrix products")
    if (part == "lora" and fit.lora is None) or (part == "lora_segmented" and fit.lora_segmented is None):
        return Ground(part, "assumed", f"no measurement of adapters' kernels on {gpu.name}: those of H100 and H200")
    known = by_type.get(part, {type_: None})
    if type_ not in known:
        runs = compute_type(gpu, type_)[1]
        return Ground(
            part, "assumed", f"no measurement of {type_}: the constants of {runs if runs in known else SIXTEEN}"
        )
    return Ground(part, fit.basis, fit.source)


def link_ground(link: AllReduce, gpu: Gpu, num_gpus: int) -> Ground:
    """Return the basis of all-reduces over `num_gpus` of these GPUs."""
    if link.basis != "assumed" and link.gpus and gpu.name not in link.gpus:
        whose = f"between {gpu.name}: those of {', '.join(link.gpus)}"
    elif link.basis != "assumed" and link.degrees and num_gpus not in link.degrees:
        whose = f"over {num_gpus} GPUs: from those over {', '.join(map(str, link.degrees))}"
    else:
        return Ground("all_reduce", link.basis, link.source)
    return Ground("all_reduce", "assumed", f"no measurement of all-reduces {whose} ({link.source})")


def grounds(deployment: Deployment, step_time: str = "roofline", account: str = "") -> list[Ground]:
    """Return the basis of each part of a deployment's step times, and of its memory.

    Args:
        deployment: model, GPUs and engine.
        step_time: name of the step-time model in the settings.
        account: that model's description of its own fit.
    """
    times = _of_kernels(deployment) if step_time in FORMULAS else [_of_model(step_time, account)]
    return [*times, *_of_memory(deployment)]


def slow_kernels(deployment: Deployment, step_time: str = "roofline") -> list[str]:
    """Describe the kernels of a deployment that take longer in its narrow type than in a wider one.

    Args:
        deployment: model, GPUs and engine.
        step_time: name of the step-time model in the settings.
    """
    slow = slow_type(deployment) if step_time == "roofline" else None
    return [] if slow is None else [slow]


def _of_kernels(deployment: Deployment) -> list[Ground]:
    gpu, precision, modern = deployment.gpu, deployment.precision, deployment.engine.modern
    weights = precision.integers or precision.weight_type
    types = [("gemm", weights), ("attention", precision.kv_type), ("elementwise", SIXTEEN)]
    found = [kernel_ground(gpu, part, type_, modern=modern) for part, type_ in types]
    if deployment.model.num_experts > 1:
        experts = precision.expert_type
        found.append(_of_experts(deployment, weights if experts == SIXTEEN else experts))
    if deployment.lora.kernels != "roofline":
        found.append(kernel_ground(gpu, _LORA_PARTS[deployment.lora.kernels], SIXTEEN))
    if deployment.model.caveat:
        found.append(Ground("model", "assumed", deployment.model.caveat))
    if deployment.tensor_parallel > 1:
        found.append(link_ground(deployment.link, gpu, deployment.tensor_parallel))
    if deployment.enforce_eager:
        found.append(Ground("launches", "assumed", "the CPU of one A10's host, fitted to runs of vLLM 0.30"))
    return [*found, *_of_host(deployment.engine, gpu)]


def _of_experts(deployment: Deployment, weights: str) -> Ground:
    gpu, engine = deployment.gpu, deployment.engine
    found = kernel_ground(gpu, "moe", weights, modern=engine.modern)
    if found.basis == "assumed":
        return found
    if weights == "mxfp4" and deployment.moe_backend == "marlin":
        if expert_type(deployment) == MARLIN:
            return kernel_ground(gpu, "moe", MARLIN, modern=engine.modern)
        return Ground("moe", "assumed", f"no measurement of Marlin's kernel on {gpu.name}: the one timed for mxfp4")
    if weights != "fp8" or engine.fp8_experts == weights:
        return found
    why = f"no measurement of {weights} in {engine.name}: the constants of {engine.fp8_experts}"
    return Ground("moe", "assumed", why)


def _of_host(engine: Engine, gpu: Gpu) -> list[Ground]:
    """Return the basis of the CPU's share and of the factors on kernels; empty for an engine without either."""
    figures = [field.name for field in fields(engine) if field.name not in _WORDS]
    if all(getattr(engine, name) == getattr(KERNELS_ONLY, name) for name in figures):
        return []
    if engine.basis != "assumed" and engine.gpus and gpu.name not in engine.gpus:
        return [Ground("host", "assumed", f"no measurement of {engine.name} on {gpu.name}: {engine.source}")]
    most = "" if engine.most_sequences is None else f"; up to {engine.most_sequences} sequences in a step"
    return [Ground("host", engine.basis, engine.source + most)]


def _of_model(step_time: str, account: str) -> Ground:
    match step_time:
        case "table":
            return Ground("step time", "measured", "worker.profile")
        case "fitted":
            return Ground(f"step time ({account})" if account else "step time", "fitted", "to worker.profile")
        case "constant":
            return Ground("step time", "assumed", "worker.constant")
        case _:
            return Ground("step time", "assumed", f"the formula of {step_time}")


def _of_memory(deployment: Deployment) -> list[Ground]:
    gpu, use = deployment.gpu, deployment.memory
    if use.reported and gpu.usable_memory_gb is not None:
        size = Ground("usable_memory_gb", "measured", "as devices report it")
    else:
        missing = f"no measurement of {gpu.name}'s memory: " if use.reported else ""
        size = Ground("memory_gb", "assumed", f"{missing}its label's {gpu.memory_gb:g} GB")
    why = f"settings, not measured: {use.own_gb:g} GB of each GPU, and {float(use.share):g} of"
    why += " what these and weights leave" if use.of_rest else " its memory"
    return [size, Ground("activation_gb", "assumed", why), Ground("gpu_memory_utilization", "assumed", why)]


def with_sources(grounds: Iterable[Ground]) -> list[str]:
    """Return a line for each pair of basis and source, with its figures: `fitted: gemm, host (SOURCE)`."""
    parts: dict[tuple[str, str], list[str]] = {}
    for ground in grounds:
        parts.setdefault((ground.basis, ground.why), []).append(ground.part)
    return [f"{basis}: {', '.join(names)}{f' ({why})' if why else ''}" for (basis, why), names in parts.items()]


def in_one_line(grounds: Iterable[Ground]) -> str:
    """Return each basis once with the figures that have it; figures assumed for lack of a measurement are marked so."""
    parts: dict[str, list[str]] = {}
    for ground in grounds:
        named, colon, _ = ground.why.partition(":")
        basis: str = ground.basis
        if basis == "assumed" and named.startswith(_MISSING):
            basis = named if colon else "no measurement"
        parts.setdefault(basis, []).append(ground.part)
    return "; ".join(f"{basis}: {', '.join(names)}" for basis, names in parts.items())
