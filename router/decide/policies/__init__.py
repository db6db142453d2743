"""The policies by name: each turns candidates into costs, lower is better.

Adding a policy takes one file, one entry here and one test.
"""

from router.decide.policies.baselines import LEAST_LOADED, ROUND_ROBIN
from router.decide.policies.cache_threshold import CACHE_THRESHOLD
from router.decide.policies.conductor import CONDUCTOR
from router.decide.policies.dynamo_adaptive import DYNAMO_ADAPTIVE, DYNAMO_UNGUARDED
from router.decide.policies.dynamo_blocks import DYNAMO_BLOCKS
from router.decide.policies.dynamo_logit import DYNAMO_LOGIT
from router.decide.policies.pair import DECODE_ROOM, PREFILL_QUEUE
from router.decide.policies.policy import Policy
from router.decide.policies.power_of_two import POWER_OF_TWO
from router.decide.policies.session_sticky import SESSION_STICKY
from router.decide.policies.ttft import TTFT

POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        DYNAMO_ADAPTIVE,
        DYNAMO_UNGUARDED,
        DYNAMO_LOGIT,
        DYNAMO_BLOCKS,
        CONDUCTOR,
        TTFT,
        CACHE_THRESHOLD,
        LEAST_LOADED,
        POWER_OF_TWO,
        SESSION_STICKY,
        ROUND_ROBIN,
        PREFILL_QUEUE,
        DECODE_ROOM,
    )
}
