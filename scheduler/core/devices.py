"""Device figures that the core uses, by the names that settings and workers use.

The shell reads the catalogue's tables: a pure room opens no files.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from lorrery.scheduler.core.adapter_costs import AdapterCosts
from lorrery.scheduler.core.queues.profile import DeviceProfile
from lorrery.worker.device.catalogue import PACKAGE, Catalogue
from lorrery.worker.device.deployment import Deployment
from lorrery.worker.device.steptime import STEP_TIME_MODELS

TABLES_PACKAGE = PACKAGE
"""The package whose folder `data` holds the shipped tables."""

ENGINE = "present-day"
"""Workers do not announce their engine; for costs that are only compared with each other, any one will do."""


class Devices:
    """GPUs, models and engines by name.

    Args:
        tables: pairs (source of the table, table), as for `worker.device.catalogue`.

    Raises:
        CatalogueError: a malformed table.
    """

    def __init__(self, tables: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        self._catalogue = Catalogue(tables)

    def adapter_costs(
        self,
        model: str,
        target_modules: Literal["qkvo", "all-linear"],
        host_gb_per_second: float,
        disk_gb_per_second: float,
    ) -> AdapterCosts:
        """Return what the adapters of a base model cost.

        Raises:
            CatalogueError: no such model.
        """
        return AdapterCosts(self._catalogue.model(model), target_modules, host_gb_per_second, disk_gb_per_second)

    def profile(self, gpu: str, model: str, tensor_parallel: int, step_time: str) -> DeviceProfile:
        """Return the profile of a device by the names that workers announce.

        A `table` or a `fitted` log is known to its worker alone; the roofline stands in for such a device.

        Raises:
            CatalogueError: no such GPU or model.
            KeyError: no such step-time model.
        """
        known = self._catalogue.gpu(gpu)
        engine = self._catalogue.engine(ENGINE, known)
        deployment = Deployment(known, self._catalogue.model(model), tensor_parallel, engine=engine)
        build = STEP_TIME_MODELS["roofline" if step_time in ("table", "fitted") else step_time]
        return DeviceProfile(build(deployment), deployment.gpu, deployment.model, tensor_parallel)
