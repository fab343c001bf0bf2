"""`simulate train`: one training step in time, of a plan or of a layout.

Not here: flags (`cli`), pictures and words (`report`).
"""

from __future__ import annotations

import os
from typing import Any

from meshwise.commands.estimate_train import estimate_train
from meshwise.commands.export import read_plan
from meshwise.core.errors import MeshwiseError
from meshwise.search import Plan
from meshwise.simulation import StepTimeline, simulate_training_step


def simulate_step(plan: Plan | str | os.PathLike[str], **job: Any) -> StepTimeline:
    """Place one step of a training plan in time: what `meshwise simulate` answers, as values.

    >>> import meshwise
    >>> planning = meshwise.estimate_train(
    ...     "llama-3-8b", on="v5p:4x4x4", batch_tokens="1Mi", seq_len=4096, layout="stage=4,fsdp=4,tensor=4"
    ... )
    >>> timeline = meshwise.simulate_step(planning.plans[0])
    >>> abs(timeline.total / planning.plans[0].estimate.step_time.expected - 1) < 1e-9
    True

    The same in one call:

    >>> again = meshwise.simulate_step(
    ...     "llama-3-8b", on="v5p:4x4x4", batch_tokens="1Mi", seq_len=4096, layout="stage=4,fsdp=4,tensor=4"
    ... )
    >>> again.total == timeline.total
    True

    Args:
        plan: a plan, or the file that one was saved in; with `job`, a model.
        job: cluster, batch, layout and the like: the keywords of `estimate_train`.

    Raises:
        MeshwiseError: a file that holds no plan; an argument that cannot be understood.
    """
    if job:
        if isinstance(plan, Plan):
            raise MeshwiseError(
                f"plan: a plan has its job in it, found {', '.join(sorted(job))} besides; leave them out"
            )
        return simulate_step(estimate_train(str(plan), **job).plans[0])
    if not isinstance(plan, Plan | str | os.PathLike):
        raise MeshwiseError(f"plan: expected a plan or the file of one, found {plan!r}")
    found = plan if isinstance(plan, Plan) else read_plan(plan)
    return simulate_training_step(found.problem, found.fabric, found.layout)
