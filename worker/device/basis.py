"""What a deployment's figures rest on: measured, fitted to measurements of that GPU, or assumed to hold for it."""

from collections.abc import Mapping
from dataclasses import dataclass

from lorrery.worker.device.deployment import Deployment
from lorrery.worker.device.hardware import SIXTEEN, AllReduce, Basis, Gpu, KernelFit


@dataclass(frozen=True, slots=True)
class Ground:
    """What one part of a step's time rests on.

    Attributes:
        part: which.
        basis: how it was found.
        why: the source, or what is assumed.
    """

    part: str
    basis: Basis
    why: str


def no_measurement(gpu: Gpu, *, modern: bool = True) -> str | None:
    """Say that nobody measured such a GPU's kernels, and whose constants are taken; None where it was measured."""
    fit, name = gpu.kernels(modern=modern), gpu.modern_fit_name if modern else gpu.fit_name
    if fit.basis != "assumed" and (not fit.gpus or gpu.name in fit.gpus):
        return None
    whose = f"those of {', '.join(fit.gpus)}" if fit.gpus else fit.source or f"the fit {name!r}"
    return f"no measurement of {gpu.name}: its data sheet with assumed constants ({whose})"


def grounds(deployment: Deployment) -> list[Ground]:
    """Say what each part of a deployment's step times rests on."""
    gpu, fit, modern = deployment.gpu, deployment.fit, deployment.engine.modern
    missing = no_measurement(gpu, modern=modern)
    types: list[tuple[str, str, Mapping[str, object]]] = [
        ("gemm", deployment.precision.weight_type, fit.gemm),
        ("attention", deployment.precision.kv_type, fit.attention),
        ("elementwise", SIXTEEN, {SIXTEEN: None}),
    ]
    if deployment.model.num_experts > 1:
        types.append(("moe", deployment.precision.weight_type, fit.moe))
    found = [_kernels(fit, part, type_, type_ in known, missing) for part, type_, known in types]
    if deployment.model.caveat:
        found.append(Ground("model", "assumed", deployment.model.caveat))
    if deployment.tensor_parallel > 1:
        found.append(_all_reduce(deployment.link))
    return found


def _kernels(fit: KernelFit, part: str, type_: str, type_known: bool, missing: str | None) -> Ground:
    if missing is not None:
        return Ground(part, "assumed", missing)
    if part in fit.assumed or f"{part}.{type_}" in fit.assumed:
        return Ground(part, "assumed", f"no measurement of {part} kernels")
    if not type_known:
        return Ground(part, "assumed", f"no measurement of {type_}: the constants of {SIXTEEN}")
    return Ground(part, fit.basis, fit.source)


def _all_reduce(link: AllReduce) -> Ground:
    return Ground("all_reduce", link.basis, link.source)
