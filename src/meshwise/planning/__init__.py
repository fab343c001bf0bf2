"""The search for the best plan, and the reasons it gives.

Not here: what one layout costs (`costs`), and how an answer looks (`report`).
"""

from meshwise.planning.front import FRONT_SPAN, Found
from meshwise.planning.plan import Plan
from meshwise.planning.planner import MAX_MEMORY, Planning, estimate_layout, plan_training, training_limits
from meshwise.planning.rivals import Rival, rivals
from meshwise.planning.scaling import Point, Scaling, scale_training
from meshwise.planning.search import OBJECTIVES, SearchResult, SearchSpace, search
from meshwise.planning.sensitivity import Sensitivity, sensitivity
from meshwise.planning.wishes import Wishes, most_seconds_per_token, parse_fixed, parse_forbidden

__all__ = [
    "FRONT_SPAN",
    "MAX_MEMORY",
    "OBJECTIVES",
    "Found",
    "Plan",
    "Planning",
    "Point",
    "Rival",
    "Scaling",
    "SearchResult",
    "SearchSpace",
    "Sensitivity",
    "Wishes",
    "estimate_layout",
    "most_seconds_per_token",
    "parse_fixed",
    "parse_forbidden",
    "plan_training",
    "rivals",
    "scale_training",
    "search",
    "sensitivity",
    "training_limits",
]
