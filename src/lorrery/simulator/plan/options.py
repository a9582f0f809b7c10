"""What a plan is asked for: the table of options of `lorrery.plan` and of the command `lorrery plan`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from lorrery.loadgen.workload.request import MOST_TOKENS
from lorrery.service.errors import SettingsError
from lorrery.service.options import Option
from lorrery.simulator.arguments import read_positive, read_whole, shown
from lorrery.simulator.options import Overrides, SettingsLike
from lorrery.vocabulary.units import LAST_SECONDS
from lorrery.worker.device.capacity import Workload

__all__ = ["FEWEST_REQUESTS", "Claim", "PlanOptions"]

FEWEST_REQUESTS = 100
"""Fewest requests of a trial, where the caller gives their number."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A seller's claim: TTFT in seconds for a prompt of `prompt_tokens`, and tokens per second."""

    prompt_tokens: int
    ttft: float
    tokens_per_second: float


def _numbers(option: str) -> Callable[[str], tuple[int, ...]]:
    """Return a parser of N,N,..., which names the option."""

    def parse(text: str) -> tuple[int, ...]:
        try:
            numbers = tuple(int(part) for part in text.split(","))
        except ValueError:
            raise SettingsError(f"{option} {text}: expected whole numbers, as in 8,16,32") from None
        if min(numbers) < 1:
            raise SettingsError(f"{option} {text}: every number must be at least 1")
        return numbers

    return parse


def _parse_concurrency(text: str) -> tuple[int, ...] | None:
    return _numbers("--concurrency")(text) if text else None


def _parse_claim(text: str) -> Claim | None:
    if not text:
        return None
    try:
        prompt_tokens, ttft, tokens_per_second = text.split(",")
        claim = Claim(int(prompt_tokens), float(ttft), float(tokens_per_second))
    except ValueError:
        raise SettingsError(f"--claim {text}: expected TOKENS,SECONDS,TOKENS/S, as in 3500,1,300") from None
    if not all(0 < number <= MOST_TOKENS for number in (claim.prompt_tokens, claim.ttft, claim.tokens_per_second)):
        raise SettingsError(f"--claim {text}: every number must be more than 0 and at most {MOST_TOKENS:,}")
    return claim


def _read_claim(name: str, claim: object) -> Claim:
    if not isinstance(claim, Claim):
        raise SettingsError(
            f"{name} is {shown(claim)}; it must be a lorrery.Claim(prompt_tokens, ttft, tokens_per_second)"
        )
    return Claim(
        read_whole(f"{name}.prompt_tokens", claim.prompt_tokens, 1),
        read_positive(f"{name}.ttft", claim.ttft),
        read_positive(f"{name}.tokens_per_second", claim.tokens_per_second),
    )


@dataclass(frozen=True)
class PlanOptions:
    """Shape of every request, the service level, and the load to serve within it."""

    settings: Annotated[
        SettingsLike,
        "Of the cluster, as for `simulate`; its worker and `model` are the deployment. Of several kinds of worker,"
        " `worker.group` names one by its group.",
    ] = None
    _: KW_ONLY
    prompt_tokens: Annotated[int, Option("Tokens per prompt.", names=("--prompt",), least=1)] = 1750
    output_tokens: Annotated[int, Option("Tokens per output.", names=("--output",), least=2)] = 500
    adapters: Annotated[int, Option("Number of adapters, each requested equally often.", least=0)] = 0
    ranks: Annotated[
        Sequence[int],
        Option(
            "Ranks of the adapters, in turn; default: 16.",
            metavar="R,R,...",
            names=("--rank",),
            parse=_numbers("--rank"),
            least=1,
            in_python="Adapter i has rank `ranks[i % len(ranks)]`.",
        ),
    ] = (16,)
    ttft: Annotated[
        float | None,
        Option(
            "Service level: TTFT.",
            metavar="SECONDS",
            least=0,
            most_typed=LAST_SECONDS,
            in_python="Service level: mean seconds to the first token; None: no limit.",
        ),
    ] = 1.0
    tpot: Annotated[
        float | None,
        Option(
            "Service level: time per further token, including stalls.",
            metavar="SECONDS",
            least=0,
            most_typed=LAST_SECONDS,
            in_python="Service level: mean seconds per further token, stalls included; None: no limit.",
        ),
    ] = 0.05
    rate: Annotated[
        float | None,
        Option(
            "Find how many GPUs this request rate needs, by simulation.", metavar="REQ/S", above=0, least_typed=0.001
        ),
    ] = None
    num_requests: Annotated[
        int | None,
        Option(
            "Requests per simulated run; default: 10 x rate x E2E, from 1,000 to 60,000.",
            metavar="N",
            names=("--requests",),
            least=FEWEST_REQUESTS,
        ),
    ] = None
    concurrency: Annotated[
        Sequence[int] | None,
        Option(
            "Concurrent streams; default: powers of two, and as many as fit.",
            metavar="N,N,...",
            parse=_parse_concurrency,
            least=1,
        ),
    ] = None
    max_concurrency: Annotated[
        int | None,
        Option("Maximum streams per replica; default: running_max_req_size or max_num_seqs.", metavar="N", least=1),
    ] = None
    claim: Annotated[
        Claim | None,
        Option(
            "Claimed performance to judge, such as 3500,1,300.",
            metavar="TOKENS,SECONDS,TOKENS/S",
            parse=_parse_claim,
            read=_read_claim,
            in_python="A seller's claim to check.",
        ),
    ] = None
    overrides: Annotated[Overrides, "Single settings, which override `settings`."] = ()

    @property
    def work(self) -> Workload:
        """The request that every stream repeats."""
        return Workload(self.prompt_tokens, self.output_tokens, self.adapters, self.ranks)

    @property
    def limits(self) -> Mapping[str, int]:
        """The settings that `max_concurrency` stands for."""
        most = self.max_concurrency
        return {} if most is None else {f"scheduler.{key}": most for key in ("running_max_req_size", "max_num_seqs")}
