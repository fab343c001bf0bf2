"""The search for the best way to serve: layouts of prefill and generation, together or apart, and batches.

Not here: what one setup costs (`costs.serving`) and words (`report`).
"""

from meshwise.search.plan import ServingPlan
from meshwise.search.serving.constraints import ServingConstraints
from meshwise.search.serving.planner import ServingPlanResult, plan_serving
from meshwise.search.serving.studies import plan_simulated, simulator_setup

__all__ = [
    "ServingConstraints",
    "ServingPlan",
    "ServingPlanResult",
    "plan_serving",
    "plan_simulated",
    "simulator_setup",
]
