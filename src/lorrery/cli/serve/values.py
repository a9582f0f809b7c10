"""Reads values of `lorrery serve`'s flags: adapters, failures, counts, durations and ports.

`--lora-modules` takes adapters by rank, by folder, or as vLLM's and llm-d-inference-sim's JSON:

sql=16                                    rank 16
sql=/adapters/sql                         rank `r` of /adapters/sql/adapter_config.json
{"name": "sql", "path": "/adapters/sql", "base_model_name": "Llama-3-8B"}        the same; "rank" goes before "path"
[{"name": ...}, ...]                      several
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from lorrery.router.peft import CONFIG, read_config
from lorrery.service.errors import FormatError, SettingsError
from lorrery.service.names import cut, quoted
from lorrery.service.settings.sections import MAX_PORT

_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter.

    Attributes:
        name: as requests name it.
        rank: of its matrices.
        modules: projections that it changes; empty: not known.
        path: its folder; None: none is given.
    """

    name: str
    rank: int
    modules: frozenset[str] = frozenset()
    path: str | None = None


def read_adapters(given: Iterable[str], max_lora_rank: int) -> list[Adapter]:
    """Parse the values of `--lora-modules`, in the forms above.

    Args:
        given: the values.
        max_lora_rank: of the deployment; for the ranks of single modules.

    Raises:
        SettingsError: a value has another form, its rank cannot be determined, or vLLM refuses its adapter.
    """
    return [adapter for text in given if text.strip() for adapter in _read(text.strip(), max_lora_rank)]


def wide(modules: Iterable[str]) -> bool:
    """Return whether any projection is outside attention, in which case adapters count as on all projections."""
    return any(name.rpartition(".")[2] not in _ATTENTION for name in modules)


def _read(text: str, max_lora_rank: int) -> Iterator[Adapter]:
    if text.startswith(("[", "{")):
        try:
            found: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SettingsError(f"--lora-modules {quoted(text)}: no JSON: {error}") from None
        for one in found if isinstance(found, list) else [found]:
            yield _of_json(one, text, max_lora_rank)
        return
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise SettingsError(f"--lora-modules {text}: NAME=RANK or NAME=PATH expected")
    yield Adapter(name, int(value)) if value.isascii() and value.isdigit() else _of_folder(name, value, max_lora_rank)


def _of_json(one: Any, text: str, max_lora_rank: int) -> Adapter:  # noqa: ANN401  what JSON may hold
    name = one.get("name") if isinstance(one, dict) else None
    if not isinstance(name, str):
        raise SettingsError(f'--lora-modules {text}: an object with "name" and "path" or "rank" expected')
    if unknown := one.keys() - {"name", "path", "rank", "base_model_name", "load_inplace"}:
        raise SettingsError(f"--lora-modules {text}: {', '.join(sorted(unknown))} has no meaning here")
    rank = one.get("rank")
    if rank is None:
        return _of_folder(name, str(one.get("path", "")), max_lora_rank)
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise SettingsError(f"--lora-modules {text}: rank is {rank!r}; it must be a whole number")
    return Adapter(name, rank)


def _of_folder(name: str, path: str, max_lora_rank: int) -> Adapter:
    cure = f"give its rank: --lora-modules {name}=16"
    if not path:
        raise SettingsError(f"--lora-modules {name}: neither path nor rank; {cure}")
    try:
        config = read_config(path, max_lora_rank)
    except FileNotFoundError as error:
        raise SettingsError(
            f"--lora-modules {name}={path}: no {CONFIG} there ({error.strerror}), and nothing is downloaded; {cure}"
        ) from None
    except FormatError as error:
        raise SettingsError(f"--lora-modules {name}={path}: {error}, or {cure}") from None
    return Adapter(name, config.rank, config.target_modules, path)


KINDS = {
    "rate_limit": "RESOURCE_EXHAUSTED",
    "invalid_api_key": "UNAUTHENTICATED",
    "context_length": "OUT_OF_RANGE",
    "server_error": "INTERNAL",
    "invalid_request": "INVALID_ARGUMENT",
    "model_not_found": "NOT_FOUND",
}
"""Failure name -> gRPC status, which determines the HTTP status."""
_DIGITS = 12


def refusals(percent: float, kinds: Sequence[str], seed: int) -> list[str]:
    """Return Lorrery's fault rules for `--failure-injection-rate`: this percentage of requests fails at once.

    Several kinds are equally frequent. Rules are tried in turn, and a request that met one meets no other, so the i-th
    of k kinds at a rate p takes (p / k) / (1 - i p / k) of the remaining requests.

    Args:
        percent: above 0.
        kinds: how they fail; empty: every kind of `KINDS`.
        seed: of the draws.

    Raises:
        SettingsError: more than 100 percent, or an unknown kind.
    """
    if percent > 100:
        raise SettingsError(f"--failure-injection-rate {percent:g}: it is a percentage, at most 100")
    for kind in kinds:
        if kind not in KINDS:
            raise SettingsError(f"--failure-types {kind}: it must be one of {', '.join(KINDS)}")
    kinds = list(dict.fromkeys(kinds)) or list(KINDS)
    each = Fraction(str(percent)) / 100 / len(kinds)
    rules: list[str] = []
    for index, kind in enumerate(kinds):
        share = f"{float(each / (1 - index * each)):.{_DIGITS}f}".rstrip("0").rstrip(".")
        drawn = "" if share == "1" else f",share={share},seed={seed + index}"
        rules.append(f"refuse,status={KINDS[kind]}{drawn}")
    return rules


_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def size(flag: str, text: str) -> int:
    """Parse a count such as 8192, 8k (8,000) or 8K (8,192), as vLLM does."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", text.strip())
    if match is None:
        raise SettingsError(f"{flag} {text}: a number expected, such as 8192, 8k (8,000) or 8K (8,192)")
    return int(Fraction(match[1]) * _SIZES[match[2]])


def seconds(flag: str, text: str, unit: float) -> float:
    """Parse a duration such as 5, 5s, 250ms; `unit`: seconds per unit of a number without one."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|)", text.strip())
    if match is None:
        raise SettingsError(f"{flag} {text}: a duration expected, such as 5s or 250ms")
    return float(match[1]) * (SECONDS[match[2]] if match[2] else unit)


def port_numbers(text: str) -> list[int]:
    """Parse the value of `--ports`: 8000,8001,8002 or 8000-8002, or both; 0 is a free port.

    Raises:
        SettingsError: it has another form, a number is no port, or a port is there twice.
    """
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
        if match is None:
            raise SettingsError(f"--ports {cut(text)}: ports expected, such as 8000-8002 or 8000,8001,8002")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last <= MAX_PORT:
            raise SettingsError(f"--ports {cut(text)}: {part.strip()} must go up, to {MAX_PORT} at most")
        found += range(first, last + 1)
    taken = [port for port in found if port]
    if len({*taken}) < len(taken):
        raise SettingsError(f"--ports {cut(text)}: a port is there twice; each engine needs its own, or 0")
    return found


def values_of(given: Iterable[str]) -> Iterator[str]:
    """Yield the values of a flag that takes several; they may also be separated by commas."""
    for text in given:
        yield from (part.strip() for part in text.split(",") if part.strip())
