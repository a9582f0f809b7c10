"""The shipped catalogue, and deployments by name, for tests."""

from typing import Any

from lorrery.service.files.reading import read_tables
from lorrery.worker.device.batch import Batch
from lorrery.worker.device.catalogue.tables import PACKAGE, Catalogue
from lorrery.worker.device.deployment import Deployment

CATALOGUE = Catalogue(read_tables(PACKAGE))


def deployment(gpu: str, model: str, tensor_parallel: int = 1, engine: str | None = None, **more: Any) -> Deployment:
    """The kernels alone without an engine's name."""
    known_gpu = CATALOGUE.gpu(gpu)
    if engine is not None:
        more["engine"] = CATALOGUE.engine(engine, known_gpu)
    return Deployment(known_gpu, CATALOGUE.model(model), tensor_parallel, **more)


def decodes(num: int, kv_tokens: int) -> Batch:
    """A batch of `num` decodes after `kv_tokens` tokens each."""
    return Batch((), num, num * kv_tokens, kv_tokens)
