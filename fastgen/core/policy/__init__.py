"""Who runs: sequences, blocks, the prefix cache and the scheduler. No torch, no clock; same arrivals, same plans."""

from __future__ import annotations

from fastgen.core.policy.blocks import BlockAllocator, BlockError
from fastgen.core.policy.composition import POLICIES, PolicyName, policy_named
from fastgen.core.policy.plan import Outcome, Plan, Stats
from fastgen.core.policy.pool import Pool
from fastgen.core.policy.prefix_cache import PrefixCache, PrefixMatch
from fastgen.core.policy.queue import QUEUE_ORDERS, QueueOrder
from fastgen.core.policy.scheduler import NeverFits, Scheduler
from fastgen.core.policy.sequence import Sequence, State

__all__ = [
    "POLICIES",
    "QUEUE_ORDERS",
    "BlockAllocator",
    "BlockError",
    "NeverFits",
    "Outcome",
    "Plan",
    "PolicyName",
    "Pool",
    "PrefixCache",
    "PrefixMatch",
    "QueueOrder",
    "Scheduler",
    "Sequence",
    "State",
    "Stats",
    "policy_named",
]
