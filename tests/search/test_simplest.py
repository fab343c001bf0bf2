"""What was kept of the search of the best finds the same simplest plan as searches of their own do."""

from dataclasses import replace

import pytest

from meshwise.costs.fitted import find_calibration
from meshwise.costs.problem import TrainingProblem
from meshwise.exports import tools_for
from meshwise.hardware import parse_cluster
from meshwise.jobs import TrainingJob
from meshwise.models import load_model
from meshwise.search import MAX_MEMORY, SearchSpace, training_limits
from meshwise.search.candidates import Choices
from meshwise.search.constraints import Constraints
from meshwise.search.limits import Wanted, find_best
from meshwise.search.simplest import find_simplest

#: Model, cluster, tokens of a batch, objective, share within which plans are not told apart, tool, what is tried.
ASKED = (
    ("llama-3-8b", "h100:16", "1Mi", "time", 0.02, "", {}),
    ("llama-3-8b", "h100:16", "1Mi", "time", 0.3, "meshwise", {}),
    ("llama-3-8b", "h100:64", "512Ki", "cost", 0.05, "", {"fully_sharded": (False,)}),
    ("qwen2.5-7b", "mi300x:24", "768Ki", "time", 0.02, "", {}),
    ("llama-3-70b", "h100:64", "4Mi", "time", 0.05, "megatron", {"remat": ("none", "full")}),
    ("llama-3-8b", "v5e:4x8", "512Ki", "time", 0.1, "meshwise", {}),
    ("llama-3-8b", "v5e:4x8", "512Ki", "time", 0.1, "", {"schedule": ("zb-h1", "1f1b")}),
    ("gpt-oss-20b", "h100:8", "1Mi", "time", 0.05, "meshwise", {"remat": ("none", "matmuls")}),
)


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: " ".join(map(str, asked)))
def test_what_was_kept_finds_the_same_plan(asked):
    model, on, batch, objective, within, tool, tried = asked
    cluster = parse_cluster(on)
    job = TrainingJob(batch_tokens=batch, seq_len="4096")
    problem = TrainingProblem(load_model(model), job, cluster, find_calibration("fitted", cluster.chip))
    tools = tools_for(problem, [tool]) if tool else ()
    space = SearchSpace(training_limits(problem), Choices(**tried), memory_share=MAX_MEMORY, tools=tools)
    wanted = Wanted(problem, Constraints(within=within), objective, 5, space, lambda _: None)
    ranked = find_best(wanted).result.best
    assert wanted.kept
    found, alone = (find_simplest(replace(wanted, kept=kept), ranked) for kept in (wanted.kept, []))
    assert found == alone
    assert found is None or len(found.layout.used_axes) <= len(ranked[0].layout.used_axes)
