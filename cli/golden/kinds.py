"""The kinds of golden records, in one tuple. A record belongs to at most one of them."""

from lorrery.cli.golden.kind import Kind
from lorrery.cli.golden.length_limits import LengthLimits
from lorrery.cli.golden.llmmock_decode_length import LlmMockDecodeLength
from lorrery.cli.golden.llmmock_scheduler import LlmMockScheduler
from lorrery.cli.golden.llmmock_step_time import LlmMockStepTime
from lorrery.cli.golden.llmmock_trie import LlmMockTrie
from lorrery.cli.golden.router_loop import QUEUES, SloraRouterLoop
from lorrery.cli.golden.run_exp_metrics import RunExpMetrics
from lorrery.cli.golden.sampling_params import SamplingParameters
from lorrery.cli.golden.slora_queues import SLORA_QUEUES
from lorrery.cli.golden.trace_generate_requests import TraceGenerateRequests

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
