"""Options that define a worker: engine, model, GPU and so on. Each sets one setting, as `--set` would."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from lorrery.chassis.commands import command_option, takes
from lorrery.chassis.errors import SettingsError
from lorrery.chassis.names import cut

__all__ = ["takes_deployment", "with_deployment"]

_PANEL = "Deployment"

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class _Option:
    """One option; its parameter has the name of its key in the table.

    Attributes:
        setting: that it sets.
        short: another name on the command line.
    """

    kind: type[str] | type[int]
    setting: str
    metavar: str
    help: str
    short: str = ""


_OPTIONS = {
    "engine": _Option(
        str,
        "engine",
        "NAME[-VERSION]",
        "Inference engine whose defaults apply: vllm, sglang, trtllm. Overrides the file; --set overrides it.",
    ),
    "model": _Option(str, "model", "NAME", "Base model."),
    "gpu": _Option(str, "worker.gpu", "NAME", "GPU."),
    "tensor_parallel": _Option(int, "worker.tensor_parallel", "N", "GPUs per worker.", "--tp"),
    "gpus": _Option(int, "worker.gpus", "N", "Workers per process, one GPU each."),
    "weight_dtype": _Option(str, "worker.weight_dtype", "TYPE", "Number format of the weights."),
    "kv_dtype": _Option(str, "worker.kv_dtype", "TYPE", "Number format of the KV cache."),
}


def takes_deployment(*names: str, before: str) -> Callable[[_F], _F]:
    """Return a decorator that gives a command of `**given` these options.

    Args:
        names: of options; none: all.
        before: the command's parameter that they precede.
    """
    return takes(
        (
            command_option(
                name,
                option.kind | None,
                None,
                f"--{name.replace('_', '-')}",
                *filter(None, [option.short]),
                metavar=option.metavar,
                help=option.help,
                rich_help_panel=_PANEL,
                min=1 if option.kind is int else None,
            )
            for name, option in _OPTIONS.items()
            if not names or name in names
        ),
        before=before,
    )


def with_deployment(given: Mapping[str, Any], overrides: Iterable[str] | None) -> list[str]:
    """Return the overrides that the options above stand for, followed by those of `--set`.

    Args:
        given: the options' values by parameter; other entries are ignored.
        overrides: the values of `--set`.

    Raises:
        SettingsError: an option and a `--set` set the same key.
    """
    from lorrery.chassis.settings import key_of, override_of  # while a fork server imports the services

    overrides = list(overrides or ())
    found: list[str] = []
    for name, deployment_option in _OPTIONS.items():
        if (value := given.get(name)) is None:
            continue
        key = deployment_option.setting
        option = f"--{name.replace('_', '-')} {cut(str(value))}"
        if same := next((one for one in overrides if key_of(one) == key), None):
            raise SettingsError(f"{option} and --set {cut(same)} both say what {key} is; give one")
        found.append(override_of(key, value))
    return [*found, *overrides]
