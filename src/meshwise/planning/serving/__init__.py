"""The search for the best way to serve: layouts of prefill and generation, together or apart, and batches.

Not here: what one setup costs (`costs.serving`) and words (`report`).
"""

from meshwise.planning.serving.plan import ServingPlan
from meshwise.planning.serving.planner import ServingPlanning, plan_serving
from meshwise.planning.serving.served import served_system
from meshwise.planning.serving.simulated import plan_simulated
from meshwise.planning.serving.wishes import ServingWishes

__all__ = ["ServingPlan", "ServingPlanning", "ServingWishes", "plan_serving", "plan_simulated", "served_system"]
