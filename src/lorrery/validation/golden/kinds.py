"""The kinds of golden records, in one tuple. A record belongs to at most one of them."""

from lorrery.validation.golden.kind import Kind
from lorrery.validation.golden.length_limits import LengthLimits
from lorrery.validation.golden.llmmock_decode_length import LlmMockDecodeLength
from lorrery.validation.golden.llmmock_scheduler import LlmMockScheduler
from lorrery.validation.golden.llmmock_step_time import LlmMockStepTime
from lorrery.validation.golden.llmmock_trie import LlmMockTrie
from lorrery.validation.golden.router_loop import QUEUES, SloraRouterLoop
from lorrery.validation.golden.run_exp_metrics import RunExpMetrics
from lorrery.validation.golden.sampling_params import SamplingParameters
from lorrery.validation.golden.sglang_scheduler import SglangScheduler
from lorrery.validation.golden.slora_queues import SLORA_QUEUES
from lorrery.validation.golden.trace_generate_requests import TraceGenerateRequests
from lorrery.validation.golden.vllm_scheduler import VllmScheduler

KINDS: tuple[Kind, ...] = (
    *SLORA_QUEUES,
    *(SloraRouterLoop(policy) for policy in QUEUES),
    SamplingParameters(),
    LengthLimits(),
    TraceGenerateRequests(),
    RunExpMetrics(),
    LlmMockTrie(),
    LlmMockStepTime(),
    LlmMockDecodeLength(),
    LlmMockScheduler(),
    SglangScheduler(),
    VllmScheduler(),
)
