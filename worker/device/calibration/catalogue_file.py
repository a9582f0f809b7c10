"""Writes fitted constants as a user's catalogue: a GPU with its kernels and links, and an engine on it."""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields

from lorrery.worker.device.catalogue.hardware import (
    AllReduce,
    AttentionFit,
    GemmFit,
    Gpu,
    KernelFit,
    LoraFit,
    MoeFit,
    SegmentedLoraFit,
)
from lorrery.worker.device.catalogue.tables import FORMAT
from lorrery.worker.device.deployment import Engine

_SHEET = (
    "tflops", "memory_gb", "usable_memory_gb", "gb_per_second", "num_sms", "pcie_gb_per_second", "fp8_tflops",
    "fp4_tflops",
)  # fmt: skip
_LINKS = ("all_reduce", "pair_all_reduce", "modern_all_reduce")


def to_toml(gpu: Gpu, source: str, *, modern: bool, host: Mapping[str, float] | None = None) -> str:
    """Return a GPU, its kernels and its links as a user's catalogue in TOML.

    The names are the GPU's with `-own`, so that no other GPU's kernels change.

    Args:
        gpu: with the fitted constants.
        source: the constants' source.
        modern: whether the constants apply to present-day engines only; otherwise to every engine.
        host: constants of an engine, by name.
    """
    plain = _plain(gpu)
    own = f"{plain}-own"
    lines = [f"format = {FORMAT}", *_fit(own, gpu.modern_fit, gpu, source)]
    if host:
        lines += ["", f"[engines.{plain}-engine]", f"source = {_text(source)}"]
        lines += [f"{key} = {figure(value)}" for key, value in host.items()]
    lines += ["", "[[gpu]]", f"name = {_text(gpu.name)}", f"source = {_text(source)}"]
    lines += [f'fit = "{gpu.fit_name}"', f'modern_fit = "{own}"'] if modern else [f'fit = "{own}"']
    for key in _SHEET:
        if (value := getattr(gpu, key)) is not None:
            lines.append(f"{key} = {figure(value)}")
    tables: list[str] = []
    for key in _LINKS:
        link: AllReduce | None = getattr(gpu, key)
        if link is not None:
            lines.append(f'{key} = "{own}-{key}"')
            tables += ["", f"[links.{own}-{key}]", f"source = {_text(link.source or source)}", *_link(link)]
    return "\n".join(lines + tables) + "\n"


def engine_toml(engine: Engine, gpu: Gpu) -> str:
    """Return an engine as it runs on a GPU of that name alone, for the end of a user's catalogue."""
    lines = ["", f"[engines.{engine.name}-{_plain(gpu)}-own]"]
    for field in fields(engine):
        value = getattr(engine, field.name)
        if field.name == "name" or value is None or (field.default is not MISSING and value == field.default):
            continue
        if isinstance(value, tuple):
            lines.append(f"{field.name} = [{', '.join(map(_text, value))}]")
        elif isinstance(value, bool):
            lines.append(f"{field.name} = {str(value).lower()}")
        else:
            lines.append(f"{field.name} = {_text(value) if isinstance(value, str) else figure(value)}")
    return "\n".join(lines) + "\n"


def _plain(gpu: Gpu) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in gpu.name.lower())


def figure(value: float) -> str:
    """Format a constant with four digits."""
    return f"{value:.4g}" if isinstance(value, float) and value < 1000 else f"{value:g}"


def _fit(name: str, fit: KernelFit, gpu: Gpu, source: str) -> list[str]:
    lines = ["", f"[fits.{name}]", f"source = {_text(source)}", f"gpus = [{_text(gpu.name)}]"]
    if fit.assumed:
        lines.append(f"assumed = [{', '.join(map(_text, fit.assumed))}]")
    lines += [f"elementwise_bandwidth = {figure(fit.elementwise_bandwidth)}"]
    lines += [f"elementwise_us = {figure(fit.elementwise_us)}"]
    for part, types in (("gemm", fit.gemm), ("attention", fit.attention), ("moe", fit.moe)):
        lines += [f"{part}.{type_name} = {_inline(constants)}" for type_name, constants in types.items()]
    for part, kernels in (("lora", fit.lora), ("lora_segmented", fit.lora_segmented)):
        if kernels is not None:
            lines.append(f"{part} = {_inline(kernels)}")
    return lines


def _inline(constants: GemmFit | AttentionFit | MoeFit | LoraFit | SegmentedLoraFit) -> str:
    inner = ", ".join(f"{key} = {figure(value)}" for key, value in asdict(constants).items())
    return f"{{ {inner} }}"


def _link(link: AllReduce) -> list[str]:
    lines = [f"basis = {_text(link.basis)}"]
    for field in fields(link):
        value = getattr(link, field.name)
        if field.name == "by_degree" and value:
            inner = ", ".join(f"{degree} = {figure(bandwidth)}" for degree, bandwidth in value)
            lines.append(f"gb_per_second = {{ {inner} }}")
        elif field.name == "gpus" and value:
            lines.append(f"gpus = [{', '.join(map(_text, value))}]")
        elif field.name == "degrees" and value:
            lines.append(f"degrees = [{', '.join(map(str, value))}]")
        elif isinstance(value, float | int) and not (field.name == "gb_per_second" and link.by_degree):
            lines.append(f"{field.name} = {figure(value)}")
    return lines


def _text(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
