"""The search for the best way to serve: layouts of prefill and generation, together or apart, and batches.

Not here: what one setup costs (`costs.serving`) and words (`report`).
"""

from meshwise.planning.serving.planner import ServingPlanning, plan_serving
from meshwise.planning.serving.wishes import ServingWishes

__all__ = ["ServingPlanning", "ServingWishes", "plan_serving"]
