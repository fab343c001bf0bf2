"""The search for the best plan, and the reasons it gives.

Not here: what one layout costs (`costs`), and how an answer looks (`report`).
"""

from meshwise.search.asked import OBJECTIVES, SearchResult, SearchSpace
from meshwise.search.baselines import Baseline, baselines
from meshwise.search.completed import MAX_MEMORY, complete_layout, training_limits
from meshwise.search.constraints import Constraints, most_seconds_per_token, parse_fixed, parse_forbidden
from meshwise.search.plan import NOT_SEARCHED, Plan
from meshwise.search.planner import PlanResult, estimate_layout, plan_training
from meshwise.search.ranking import FRONT_SPAN, Found
from meshwise.search.search import search
from meshwise.search.studies import Point, Scaling, Sensitivity, scale_training, sensitivity

__all__ = [
    "FRONT_SPAN",
    "MAX_MEMORY",
    "NOT_SEARCHED",
    "OBJECTIVES",
    "Baseline",
    "Constraints",
    "Found",
    "Plan",
    "PlanResult",
    "Point",
    "Scaling",
    "SearchResult",
    "SearchSpace",
    "Sensitivity",
    "baselines",
    "complete_layout",
    "estimate_layout",
    "most_seconds_per_token",
    "parse_fixed",
    "parse_forbidden",
    "plan_training",
    "scale_training",
    "search",
    "sensitivity",
    "training_limits",
]
