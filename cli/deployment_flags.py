"""Options that define a worker: engine, model, GPU and so on. Each sets one setting, as `--set` would."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer

from lorrery.chassis.errors import SettingsError
from lorrery.chassis.names import cut

_PANEL = "Deployment"

Engine = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[-VERSION]",
        help="Inference engine whose defaults apply: vllm, sglang, trtllm. Overrides the file; --set overrides it.",
        rich_help_panel=_PANEL,
    ),
]
Model = Annotated[str | None, typer.Option(metavar="NAME", help="Base model.", rich_help_panel=_PANEL)]
Gpu = Annotated[str | None, typer.Option("--gpu", metavar="NAME", help="GPU.", rich_help_panel=_PANEL)]
TensorParallel = Annotated[
    int | None,
    typer.Option("--tensor-parallel", "--tp", min=1, metavar="N", help="GPUs per worker.", rich_help_panel=_PANEL),
]
Gpus = Annotated[
    int | None,
    typer.Option("--gpus", min=1, metavar="N", help="Workers per process, one GPU each.", rich_help_panel=_PANEL),
]
WeightDtype = Annotated[
    str | None,
    typer.Option("--weight-dtype", metavar="TYPE", help="Number format of the weights.", rich_help_panel=_PANEL),
]
KvDtype = Annotated[
    str | None,
    typer.Option("--kv-dtype", metavar="TYPE", help="Number format of the KV cache.", rich_help_panel=_PANEL),
]

_SETTINGS = {
    "engine": "engine",
    "model": "model",
    "gpu": "worker.gpu",
    "tensor_parallel": "worker.tensor_parallel",
    "gpus": "worker.gpus",
    "weight_dtype": "worker.weight_dtype",
    "kv_dtype": "worker.kv_dtype",
}
"""Parameter -> the setting that it sets."""


def with_deployment(given: Mapping[str, Any], overrides: Iterable[str] | None) -> list[str]:
    """Return the overrides that the options above stand for, followed by those of `--set`.

    Args:
        given: the options' values by parameter; other entries are ignored (a command's `locals()`).
        overrides: the values of `--set`.

    Raises:
        SettingsError: an option and a `--set` set the same key.
    """
    from lorrery.chassis.settings import key_of, override_of  # while a fork server imports the services

    overrides = list(overrides or ())
    found: list[str] = []
    for name, key in _SETTINGS.items():
        if (value := given.get(name)) is None:
            continue
        option = f"--{name.replace('_', '-')} {cut(str(value))}"
        if same := next((one for one in overrides if key_of(one) == key), None):
            raise SettingsError(f"{option} and --set {cut(same)} both say what {key} is; give one")
        found.append(override_of(key, value))
    return [*found, *overrides]
