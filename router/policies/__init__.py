"""The policies by name: each turns candidates into costs, lower is better.

Adding one is one file, one entry here, one test.
"""

from router.policies.baselines import LEAST_LOADED, RANDOM, ROUND_ROBIN
from router.policies.dynamo_adaptive import DYNAMO_ADAPTIVE
from router.policies.dynamo_logit import DYNAMO_LOGIT
from router.policies.policy import Policy

POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (DYNAMO_ADAPTIVE, DYNAMO_LOGIT, LEAST_LOADED, ROUND_ROBIN, RANDOM)
}
