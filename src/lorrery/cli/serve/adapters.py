"""`--lora-modules`: adapters by rank, by folder, or as vLLM's and llm-d-inference-sim's JSON.

sql=16                                    rank 16
sql=/adapters/sql                         rank `r` of /adapters/sql/adapter_config.json
{"name": "sql", "path": "/adapters/sql", "base_model_name": "Llama-3-8B"}        the same; "rank" goes before "path"
[{"name": ...}, ...]                      several
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from lorrery.router.peft import CONFIG, read_config
from lorrery.service.errors import FormatError, SettingsError
from lorrery.service.names import quoted

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
    """Parse the values of `--lora-modules`.

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
