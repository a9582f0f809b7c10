"""A model as a step-time model sees it: its shapes, its precision, and one GPU's share of it.

The figures and their sources are in `data/models.toml`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from lorrery.worker.device.catalogue.hardware import SIXTEEN, TYPE_BYTES, CatalogueError


@dataclass(frozen=True, slots=True)
class Model:
    """One transformer.

    Attributes:
        name: as settings spell it.
        num_layers: transformer layers.
        hidden: hidden size.
        num_heads: query heads.
        num_kv_heads: key-value heads.
        head_size: elements of one head.
        ffn: inner size of the feed-forward part (of one expert).
        vocabulary: tokens.
        gated: whether the feed-forward part has a gate beside its up projection.
        num_experts: feed-forward parts per layer.
        experts_per_token: number of them that a token uses.
        rotary: whether it uses rotary position embeddings.
        post_norm: whether the feed-forward part has its own norm.
        tied_head: whether the head shares the embedding's weights.
        query_key_norms: whether queries and keys are normalised, each by its own kernel.
        max_model_len: most tokens of a prompt and its output together; None: unknown.
        caveat: in what the computation deviates from the model; empty: in nothing.
        shared_ffn: total inner size of the experts that every token uses beside its chosen ones; 0: none.
        window_layers: layers whose tokens attend to the last `window` tokens only.
        window: tokens, few enough for every sequence to be taken to have them; 0: all layers attend to all.
        attention_sinks: whether every head attends to a learnt sink too, which not every kernel can.
        checkpoint: weight dtype of the published checkpoint, one of `WEIGHT_DTYPES`.
    """

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ffn: int
    vocabulary: int
    gated: bool = True
    num_experts: int = 1
    experts_per_token: int = 1
    rotary: bool = True
    post_norm: bool = True
    tied_head: bool = False
    query_key_norms: bool = False
    max_model_len: int | None = None
    shared_ffn: int = 0
    window_layers: int = 0
    window: int = 0
    attention_sinks: bool = False
    checkpoint: str = "bfloat16"
    caveat: str = ""

    @property
    def full_layers(self) -> int:
        """Number of layers whose tokens attend to all before them."""
        return self.num_layers - self.window_layers

    def is_shaped_as(self, other: "Model") -> bool:
        """Return whether another model takes the same steps, whatever its name and longest context."""
        return replace(self, name=other.name, max_model_len=other.max_model_len, caveat=other.caveat) == other

    @property
    def layer_parameters(self) -> int:
        """Number of weights in all layers, without norms and biases."""
        return self.num_layers * (self._dense_parameters + self.num_experts * self.expert_parameters)

    @property
    def active_layer_parameters(self) -> int:
        """Number of weights in all layers that one token uses."""
        return self.num_layers * (self._dense_parameters + self.experts_per_token * self.expert_parameters)

    @property
    def head_parameters(self) -> int:
        """Number of weights of the language-model head."""
        return self.vocabulary * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Number of weights of embedding and head; counted once if shared."""
        return (1 if self.tied_head else 2) * self.head_parameters

    @property
    def num_parameters(self) -> int:
        """Number of weights, without norms and biases."""
        return self.layer_parameters + self.embedding_parameters

    def distinct_experts(self, num_tokens: float) -> float:
        """Return the expected number of experts of a layer that `num_tokens` tokens use: E (1 - (1 - k/E)^n)."""
        unused: float = (1 - self.experts_per_token / self.num_experts) ** num_tokens
        return self.num_experts * (1 - unused)

    @property
    def expert_parameters(self) -> int:
        """Number of weights of one expert of one layer; without experts, of the feed-forward part."""
        return self._matrices * self.hidden * self.ffn

    @property
    def _dense_parameters(self) -> int:
        """Number of weights of a layer that every token uses: attention and shared experts."""
        heads = self.num_heads + 2 * self.num_kv_heads
        attention = self.hidden * heads * self.head_size + self.num_heads * self.head_size * self.hidden
        return attention + self._matrices * self.hidden * self.shared_ffn

    @property
    def _matrices(self) -> int:
        return 3 if self.gated else 2


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes and types of a model's numbers.

    The embedding and the head stay in 16 bits, and so do activations. 8-bit and 4-bit floating-point weights are
    multiplied in their type where the GPU can; integer weights are unpacked and multiplied in 16 bits, and so is mxfp4,
    in which only experts are stored.

    Attributes:
        weight_bytes: of a layer's weight, except experts'.
        kv_bytes: of an element of the KV cache.
        weight_type: type in which matrix products run where the GPU can: one of `hardware.WEIGHT_TYPES`, or an integer
            type, which no product has.
        integers: name of the integer type that weights are stored in and unpacked from; empty where they are not.
        expert_bytes: of an expert's weight.
        expert_type: of experts; one of `hardware.EXPERT_TYPES`.
    """

    weight_bytes: float = 2.0
    kv_bytes: int = 2
    weight_type: str = SIXTEEN
    integers: str = ""
    expert_bytes: float = 2.0
    expert_type: str = SIXTEEN

    @property
    def kv_type(self) -> str:
        """The cache's type, one of `hardware.KV_TYPES`."""
        return "fp8" if self.kv_bytes == 1 else SIXTEEN


WEIGHT_DTYPES: Mapping[str, tuple[float, str, str]] = {
    "float16": (2.0, SIXTEEN, SIXTEEN),
    "bfloat16": (2.0, SIXTEEN, SIXTEEN),
    "fp8": (1.0, "fp8", "fp8"),
    # A 32-bit scale per 128 x 128 weights.
    "fp8_block": (1.0 + 4 / 128**2, "fp8_block", "fp8_block"),
    "int8": (1.0, "int8", SIXTEEN),
    # 4 bits, and a 16-bit scale and a 4-bit zero point per group of 128 weights, as AWQ and GPTQ store them.
    "int4": (TYPE_BYTES["int4"], "int4", "int4"),
    # 4 bits, and an 8-bit scale per 16 weights.
    "nvfp4": (TYPE_BYTES["nvfp4"], "nvfp4", "nvfp4"),
    # 4 bits, and an 8-bit scale per 32 weights.
    "mxfp4": (TYPE_BYTES["mxfp4"], SIXTEEN, "mxfp4"),
}
"""Name -> (bytes per weight, type of its products, type of experts)."""
EXPERTS_ONLY: Final = "mxfp4"
"""Type that only experts are stored in, as gpt-oss does; a model's other weights are in 16 bits."""
KV_DTYPES: Mapping[str, int] = {"float16": 2, "bfloat16": 2, "fp8": 1}
"""Name -> bytes per element."""


def precision(weight_dtype: str, kv_dtype: str, model: Model | None = None) -> Precision:
    """Return the precision with these names.

    Args:
        weight_dtype: one of `WEIGHT_DTYPES`.
        kv_dtype: one of `KV_DTYPES`.
        model: whose weights they are; None: any.

    Raises:
        CatalogueError: unknown name (the message lists the known ones), or a model without experts in `EXPERTS_ONLY`.
    """
    if weight_dtype not in WEIGHT_DTYPES:
        raise CatalogueError(f"weight dtype {weight_dtype!r} is not known; known: {', '.join(WEIGHT_DTYPES)}")
    if kv_dtype not in KV_DTYPES:
        raise CatalogueError(f"KV dtype {kv_dtype!r} is not known; known: {', '.join(KV_DTYPES)}")
    if weight_dtype == EXPERTS_ONLY and model is not None and model.num_experts == 1:
        raise CatalogueError(
            f"weight dtype {weight_dtype} is one of experts, and {model.name} has none; int4 and nvfp4 have as few bits"
        )
    expert_bytes, weight_type, expert_type = WEIGHT_DTYPES[weight_dtype]
    weight_bytes = TYPE_BYTES[SIXTEEN] if weight_dtype == EXPERTS_ONLY else expert_bytes
    integers = weight_dtype if weight_dtype.startswith("int") else ""
    return Precision(weight_bytes, KV_DTYPES[kv_dtype], weight_type, integers, expert_bytes, expert_type)


@dataclass(frozen=True, slots=True)
class Shard:
    """One GPU's share of a model: heads and inner sizes divided, the hidden size whole.

    With more GPUs than KV heads each GPU holds a whole head, so heads are stored more than once. With experts
    distributed over groups of GPUs, `ffn` is a GPU's share of one expert, cut over the GPUs of its group.
    """

    queries: int
    kv: int
    ffn: int
    shared_ffn: int
    vocabulary: int

    @classmethod
    def of(cls, model: Model, tensor_parallel: int, expert_parallel: int = 1) -> "Shard":
        """Cut a model; sizes in elements.

        Raises:
            CatalogueError: the degrees do not divide the model.
        """
        check_split(model, tensor_parallel, expert_parallel)
        return cls(
            queries=model.num_heads // tensor_parallel * model.head_size,
            kv=max(model.num_kv_heads // tensor_parallel, 1) * model.head_size,
            ffn=model.ffn // (tensor_parallel // expert_parallel),
            shared_ffn=-(-model.shared_ffn // tensor_parallel),
            vocabulary=-(-model.vocabulary // tensor_parallel),
        )


def check_split(model: Model, tensor_parallel: int, expert_parallel: int = 1) -> None:
    """Check that a model can be cut into shards that are equal except for the number of experts.

    Raises:
        CatalogueError: a degree does not divide the sizes that it must.
    """
    if expert_parallel > 1:
        _check_groups(model, tensor_parallel, expert_parallel)
    cut = tensor_parallel // expert_parallel
    if model.num_heads % tensor_parallel or model.ffn % cut:
        must = f"tensor_parallel {tensor_parallel} must divide both"
        if expert_parallel > 1:
            must = (
                f"tensor_parallel {tensor_parallel} must divide the heads, and the {cut} GPUs of each of"
                f" expert_parallel {expert_parallel} groups the size"
            )
        raise CatalogueError(f"{model.name} has {model.num_heads} heads and a feed-forward size of {model.ffn}; {must}")
    if model.num_kv_heads % tensor_parallel and tensor_parallel % model.num_kv_heads:
        raise CatalogueError(
            f"{model.name} has {model.num_kv_heads} KV heads;"
            f" tensor_parallel {tensor_parallel} must divide them or be a multiple of them"
        )


def held_experts(num_experts: int, expert_parallel: int) -> int:
    """Return how many of a layer's experts the fullest of `expert_parallel` groups of GPUs holds."""
    return -(-num_experts // expert_parallel)


def _check_groups(model: Model, tensor_parallel: int, expert_parallel: int) -> None:
    if model.num_experts == 1:
        raise CatalogueError(f"{model.name} has no experts; expert_parallel {expert_parallel} must be 1")
    if tensor_parallel % expert_parallel:
        raise CatalogueError(
            f"expert_parallel {expert_parallel} must divide tensor_parallel, which is {tensor_parallel}:"
            " experts are dealt to groups of as many GPUs"
        )
    if expert_parallel > model.num_experts:
        raise CatalogueError(
            f"{model.name} has {model.num_experts} experts; expert_parallel {expert_parallel} must be at most that"
        )
