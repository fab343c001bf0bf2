"""What tests of plans ask for: a problem with a usual job, and one layout of it estimated."""

from functools import cache

from meshwise.costs.calibration import default_calibration
from meshwise.costs.problem import TrainingProblem
from meshwise.hardware import parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.models import load_model
from meshwise.search import estimate_layout, plan_training
from meshwise.sharding.layout import parse_layout


def problem(model="llama-3-8b", cluster="h100:16", *, price=None, **job):
    given = {"batch_tokens": "1Mi", "seq_len": "8192", "tokens": "1T", "precision": "book"} | job
    chips = parse_cluster(cluster, price=price)
    found = load_model(model) if isinstance(model, str) else model
    return TrainingProblem(found, TrainingJob(**given), chips, default_calibration(chips.chip))


@cache
def planned():
    """The plans of the usual problem, searched for once."""
    return plan_training(problem())


def estimate(p, layout):
    (plan,) = estimate_layout(p, parse_layout(layout, num_chips=p.cluster.num_chips)).plans
    return plan
