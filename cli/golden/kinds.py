"""The kinds of golden records, in one tuple. A record belongs to at most one of them."""

from cli.golden.kind import Kind
from cli.golden.length_limits import LengthLimits
from cli.golden.llmmock_decode_length import LlmMockDecodeLength
from cli.golden.llmmock_scheduler import LlmMockScheduler
from cli.golden.llmmock_step_time import LlmMockStepTime
from cli.golden.llmmock_trie import LlmMockTrie
from cli.golden.router_loop import QUEUES, SloraRouterLoop
from cli.golden.run_exp_metrics import RunExpMetrics
from cli.golden.sampling_params import SamplingParameters
from cli.golden.slora_queues import SLORA_QUEUES
from cli.golden.trace_generate_requests import TraceGenerateRequests

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
)
