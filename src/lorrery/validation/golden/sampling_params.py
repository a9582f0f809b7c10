"""`sampling_params`: S-LoRA's normalisation and validation of sampling parameters, against `router.sampling`."""

from lorrery.router.sampling import read_sampling
from lorrery.service.errors import InvalidRequest
from lorrery.validation.golden.kind import Mismatch, Record, compare


class SamplingParameters:
    """Parameters from a client, and the result: a message, or the effective values."""

    name = "sampling_params"

    def detect(self, record: Record) -> bool:
        """Whether the record has parameters, and an error or effective values."""
        return record.keys() >= {"input", "error"} and (record["error"] is not None or "effective" in record)

    def replay(self, record: Record) -> list[Mismatch]:
        """Read the parameters as the router does."""
        try:
            params = read_sampling(record["input"])
        except InvalidRequest as error:
            return compare("error", record["error"], str(error))
        found = compare("error", record["error"], None)
        effective = params.effective()
        for name, expected in record.get("effective", {}).items():
            found += compare(f"effective {name}", expected, effective.get(name))
        return found
