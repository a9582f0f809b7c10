"""Time of a layer's experts: a grouped matrix product over the experts that one GPU holds. Seconds, bytes, FLOP.

A layer has E experts of inner size f, of which each token uses k, and hidden size h. The experts are distributed over
`ep` groups of GPUs and each is cut over `cut` GPUs, so that a GPU holds E' = ceil(E / ep) experts of f' = f / cut. n
tokens make n k pairs of a token and an expert. The GPU with most of them decides, which has I times the mean:

    pairs   = max(1, n k E'/E * I)
    read    = max(1, E' * share of its experts that n tokens meet)
    C       = 2 * 3 h f' (pairs + read * expert_rows) / (F * flops)      products; 2 in place of 3 without a gate
    M       = read * (3 h f' w / (B * bandwidth) + expert_us)            weights of w bytes
    A       = 2 (3 f' + 2 h) (a n k + (1 - a) pairs) / (B * activation_bandwidth)      permutation and activation
    experts = sqrt(C^2 + M^2) + A + us

Each expert's rows are padded to whole tiles, by `expert_rows` in the mean. a = `all_pairs` is the share of A that every
GPU does for all pairs, its own or not. The router is not in it.

How unevenly tokens use experts is a distribution, with the coefficient of variation cv over experts. m = k I / E is the
chance that a token uses one of that GPU's experts:

    balanced        every expert has as many pairs: met = min(1, n m), cv = 0
    power_law_1.2   pairs drawn from a power law of exponent 1.2 between 1 and 0.8 n, as in NVIDIA's kernel timings:
                    met = 1 - (1 - m)^n, cv grows with n; power_law_1.01 with an exponent of 1.01
    served          an expert's chance p is drawn from a Beta distribution of mean m and concentration 6:
                    met = 1 - E[(1 - p)^n], cv = sqrt((E / k - 1) / (6 + 1))

A GPU's sum over E' experts varies by cv / sqrt(E'), and the largest of ep such sums is z(ep) deviations above the mean,
z being the normal quantile of (ep - 3/8) / (ep + 1/4) (Blom 1958). A token uses an expert once, so that none has more
than n pairs:

    I = min(1 + cv z(ep) / sqrt(E'), ep, E / k)

No term falls as n rises, so more tokens never take less time.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import exp, lgamma, sqrt
from statistics import NormalDist

from lorrery.worker.device.catalogue.architecture import Model, held_experts, precision
from lorrery.worker.device.catalogue.hardware import MARLIN, SIXTEEN, CatalogueError, Gpu, MoeFit
from lorrery.worker.device.deployment import Deployment
from lorrery.worker.device.kernels import KernelTimes, compute_type

LARGEST_SHARE = 0.8
"""Upper end of the power law as a share of the tokens; the lower end is a single token."""
SHOWN_TOKENS = 32
"""Tokens at which types are compared: a batch of decodes."""
CONCENTRATION = 6.0
"""Of the Beta distribution. Chosen on every third of 117 served runs of Qwen3-235B-A22B; 4 to 10 do nearly as well."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """How unevenly tokens use experts.

    Attributes:
        variation: (tokens, mean chance k/E) -> coefficient of variation of experts' pairs; never falls with the tokens.
        met: (tokens, chance m that a token uses an expert) -> share of experts that some token uses; rises with both.
    """

    variation: Callable[[int, float], float]
    met: Callable[[int, float], float]


def _power_law(power: float) -> Distribution:
    """Return the distribution of pairs per expert that follows a power law of an exponent other than 1, 2, 3."""

    def variation(num_tokens: int, _chance: float) -> float:
        largest = LARGEST_SHARE * num_tokens
        if largest <= 1:
            return 0.0
        weight = (1 - largest ** (1 - power)) / (power - 1)
        mean = (largest ** (2 - power) - 1) / (2 - power) / weight
        square = (largest ** (3 - power) - 1) / (3 - power) / weight
        return sqrt(max(square / (mean * mean) - 1, 0.0))

    return Distribution(variation, lambda tokens, chance: 1 - (1 - chance) ** tokens)


def _beta_met(num_tokens: int, chance: float) -> float:
    unused = CONCENTRATION * (1 - chance)
    if unused <= 0:
        return 1.0
    missed = lgamma(unused + num_tokens) - lgamma(unused) + lgamma(CONCENTRATION) - lgamma(CONCENTRATION + num_tokens)
    return 1 - exp(missed)


SERVED = "served"
DISTRIBUTIONS: Mapping[str, Distribution] = {
    "balanced": Distribution(lambda _tokens, _chance: 0.0, lambda tokens, chance: min(1.0, tokens * chance)),
    "power_law_1.2": _power_law(1.2),
    "power_law_1.01": _power_law(1.01),
    SERVED: Distribution(lambda _tokens, chance: sqrt((1 / chance - 1) / (CONCENTRATION + 1)), _beta_met),
}


@dataclass(frozen=True, slots=True)
class Experts:
    """A layer's experts, whole.

    Attributes:
        hidden: hidden size.
        ffn: inner size of one expert.
        count: experts.
        per_token: experts that a token uses.
        gated: whether an expert has a gate beside its up projection.
    """

    hidden: int
    ffn: int
    count: int
    per_token: int
    gated: bool = True

    @classmethod
    def of(cls, model: Model) -> "Experts":
        """Return a model's experts."""
        return cls(model.hidden, model.ffn, model.num_experts, model.experts_per_token, model.gated)


class ExpertKernels:
    """The formulas above for one GPU.

    Args:
        gpu: the data sheet.
        fit: its kernels' efficiency against the data sheet, for the type of the weights.
        experts: of one layer.
        tflops: peak for the type of the products.
        weight_bytes: of one weight.
        expert_parallel: groups of GPUs over which the experts are distributed.
        cut: GPUs over which each expert is cut.
        distribution: how unevenly tokens use experts, one of `DISTRIBUTIONS`.

    Raises:
        CatalogueError: unknown distribution, an expert that cannot be cut this way, or more groups than experts.
    """

    def __init__(
        self,
        gpu: Gpu,
        fit: MoeFit,
        experts: Experts,
        *,
        tflops: float,
        weight_bytes: float,
        expert_parallel: int = 1,
        cut: int = 1,
        distribution: str = SERVED,
    ) -> None:
        if distribution not in DISTRIBUTIONS:
            raise CatalogueError(
                f"distribution of tokens over experts {distribution!r} is not known; known: {', '.join(DISTRIBUTIONS)}"
            )
        if experts.ffn % cut:
            raise CatalogueError(f"experts have an inner size of {experts.ffn}, which {cut} GPUs cannot share equally")
        self._per_token, self._distribution = experts.per_token, DISTRIBUTIONS[distribution]
        self._held = held_experts(experts.count, expert_parallel)
        self._share = self._held / experts.count
        self._chance = experts.per_token / experts.count
        self._most = min(float(expert_parallel), experts.count / experts.per_token)
        quantile = (expert_parallel - 0.375) / (expert_parallel + 0.25)
        self._deviations = NormalDist().inv_cdf(quantile) / sqrt(self._held) if expert_parallel > 1 else 0.0
        products, ffn, bytes_per_second = 3 if experts.gated else 2, experts.ffn // cut, gpu.gb_per_second * 1e9
        self._row_flops = 2 * products * experts.hidden * ffn
        self._row_seconds = self._row_flops / (tflops * 1e12 * fit.flops)
        self._padding = fit.expert_rows
        self._expert_bytes = products * experts.hidden * ffn * weight_bytes
        self._expert_seconds = self._expert_bytes / (bytes_per_second * fit.bandwidth) + fit.expert_us * 1e-6
        self._pair_bytes = 2 * (products * ffn + 2 * experts.hidden)
        self._pair_seconds = self._pair_bytes / (bytes_per_second * fit.activation_bandwidth)
        self._all_pairs = fit.all_pairs
        self._constant = fit.us * 1e-6

    def imbalance(self, num_tokens: int) -> float:
        """Return the largest number of pairs on one GPU over the mean, at least 1."""
        variation = self._distribution.variation(num_tokens, self._chance)
        return max(min(1 + variation * self._deviations, self._most), 1.0)

    def read(self, num_tokens: int) -> float:
        """Return the expected number of experts that this GPU reads, at least 1."""
        chance = min(self._chance * self.imbalance(num_tokens), 1.0)
        return max(self._held * self._distribution.met(num_tokens, chance), 1.0)

    def times(self, num_tokens: int) -> KernelTimes:
        """Return the times of one layer's experts for `num_tokens` tokens, at least one."""
        all_pairs = num_tokens * self._per_token
        pairs = max(all_pairs * self._share * self.imbalance(num_tokens), 1.0)
        read = self.read(num_tokens)
        moved = self._all_pairs * all_pairs + (1 - self._all_pairs) * pairs
        compute = (pairs + read * self._padding) * self._row_seconds
        memory = read * self._expert_seconds
        both = sqrt(compute * compute + memory * memory)
        return KernelTimes(
            compute=compute * compute / both,
            memory=memory * memory / both + moved * self._pair_seconds,
            constant=self._constant,
            flops=pairs * self._row_flops,
            num_bytes=read * self._expert_bytes + moved * self._pair_bytes,
        )


def expert_type(deployment: Deployment) -> str:
    """Return which of `hardware.MOE_TYPES` has the constants of a deployment's experts."""
    weight_type = compute_type(deployment.gpu, deployment.precision.expert_type)[1]
    if weight_type == "fp8":
        return deployment.engine.fp8_experts
    if weight_type == "mxfp4" and deployment.moe_backend == "marlin" and MARLIN in deployment.fit.moe:
        return MARLIN
    return weight_type


def expert_kernels(deployment: Deployment) -> ExpertKernels | None:
    """Return the kernels of a deployment's experts; None if it has none, or its kernels' constants are unknown.

    Raises:
        CatalogueError: experts distributed over groups, without such constants.
    """
    model, precision = deployment.model, deployment.precision
    if model.num_experts == 1:
        return None
    fit = deployment.fit.moe_of(expert_type(deployment)) if deployment.engine.modern else None
    if fit is None:
        if deployment.expert_parallel > 1:
            raise CatalogueError(
                f"expert_parallel is {deployment.expert_parallel}; experts dealt to groups of GPUs are modelled for"
                f" present-day engines on GPUs whose modern_fit has constants for experts, not for engine"
                f" {deployment.engine.name} on {deployment.gpu.name}: leave it at 1"
            )
        return None
    return ExpertKernels(
        deployment.gpu,
        fit,
        Experts.of(model),
        tflops=compute_type(deployment.gpu, precision.expert_type)[0],
        weight_bytes=precision.expert_bytes,
        expert_parallel=deployment.expert_parallel,
        cut=deployment.tensor_parallel // deployment.expert_parallel,
        distribution=deployment.expert_distribution,
    )


def slow_type(deployment: Deployment) -> str | None:
    """Describe how much slower a deployment's experts are in their weights' type than in 16 bits; None if not slower.

    A measured kernel may be: with one scale per tensor on Hopper, where CUTLASS reaches a fifth of the bandwidth.
    """
    kernels, weights = expert_kernels(deployment), deployment.precision.expert_type
    if kernels is None or compute_type(deployment.gpu, weights)[1] == SIXTEEN:
        return None
    others = {name: _in_type(deployment, name) for name in ("bfloat16", "fp8_block")}
    own, sixteen = kernels.times(SHOWN_TOKENS).seconds, others["bfloat16"]
    if own <= sixteen:
        return None
    faster = ", ".join(f"{seconds * 1e3:.2f} ms in {name}" for name, seconds in others.items() if seconds < own)
    return (
        f"a layer's experts take {own * 1e3:.2f} ms for {SHOWN_TOKENS} tokens in {weights}, {faster}: the kernel that"
        f" was timed for {weights} is slow ({deployment.fit.source}); choose worker.weight_dtype accordingly, or an"
        " engine that runs another kernel"
    )


def _in_type(deployment: Deployment, weight_dtype: str) -> float:
    """Return the seconds for `SHOWN_TOKENS` tokens if the experts' weights had that type."""
    changed = replace(deployment, precision=precision(weight_dtype, "bfloat16"))
    kernels = expert_kernels(changed)
    assert kernels is not None, weight_dtype
    return kernels.times(SHOWN_TOKENS).seconds
