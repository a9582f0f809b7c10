"""Options that define a worker: engine, model, GPU and so on. Each sets one setting, as `--set` would."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from lorrery.cli.flag import Flag, takes_flags
from lorrery.service.errors import SettingsError
from lorrery.service.names import cut

__all__ = ["takes_deployment", "with_deployment"]

_F = TypeVar("_F", bound=Callable[..., Any])


def _flag(names: str, kind: type[str] | type[int], metavar: str, sets: str, text: str) -> Flag:
    least = 1 if kind is int else None
    return Flag(tuple(names.split()), kind, "Deployment", text, sets, least=least, metavar=metavar)


_FLAGS = (
    _flag(
        "--engine",
        str,
        "NAME[-VERSION]",
        "engine",
        "Inference engine whose defaults apply: vllm, sglang, trtllm. Overrides the file; --set overrides it.",
    ),
    _flag("--model", str, "NAME", "model", "Base model."),
    _flag("--gpu", str, "NAME", "worker.gpu", "GPU."),
    _flag("--tensor-parallel --tp", int, "N", "worker.tensor_parallel", "GPUs per worker."),
    _flag("--gpus", int, "N", "worker.gpus", "Workers per process, one GPU each."),
    _flag("--weight-dtype", str, "TYPE", "worker.weight_dtype", "Number format of the weights."),
    _flag("--kv-dtype", str, "TYPE", "worker.kv_dtype", "Number format of the KV cache."),
)


def takes_deployment(*names: str, before: str) -> Callable[[_F], _F]:
    """Return a decorator that gives a command of `**given` these options.

    Args:
        names: of their parameters; none: all.
        before: the command's parameter that they precede.
    """
    return takes_flags((flag for flag in _FLAGS if not names or flag.key in names), before)


def with_deployment(given: Mapping[str, Any], overrides: Iterable[str] | None) -> list[str]:
    """Return the overrides that the options above stand for, followed by those of `--set`.

    Args:
        given: the options' values by parameter; other entries are ignored.
        overrides: the values of `--set`.

    Raises:
        SettingsError: an option and a `--set` set the same key.
    """
    from lorrery.service.settings.reading import key_of, override_of  # while a fork server imports the services

    overrides = list(overrides or ())
    found: list[str] = []
    for flag in _FLAGS:
        if (value := given.get(flag.key)) is None:
            continue
        option, key = f"{flag.names[0]} {cut(str(value))}", flag.sets
        if same := next((one for one in overrides if key_of(one) == key), None):
            raise SettingsError(f"{option} and --set {cut(same)} both say what {key} is; give one")
        found.append(override_of(key, value))
    return [*found, *overrides]
