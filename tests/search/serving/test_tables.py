"""What is priced at once is what is priced alone, and of the places of a mesh on the network the fastest are left."""

from __future__ import annotations

import numpy as np
import pytest

from meshwise.costs.calibration import default_calibration
from meshwise.costs.network import PlacedWires
from meshwise.costs.problem import ServingProblem
from meshwise.costs.serving.answer import ServingSetup
from meshwise.costs.serving.estimate import cache_transfer_seconds, wires_of
from meshwise.costs.serving.sizes import StepSizes
from meshwise.costs.serving.step import price_step, time_step
from meshwise.hardware import parse_cluster
from meshwise.jobs import ServingLoad
from meshwise.models import load_model
from meshwise.search.serving.space import candidates
from meshwise.search.serving.tables import make_table
from meshwise.sharding.serving import ServingLayout

BATCHES = (1, 6, 128)
#: Tokens that a sequence computes, and that it attends to.
LENGTHS = {"prefill": (1024.0, 1024.0), "decode": (1.0, 1152.0)}


def problem(model, on):
    cluster = parse_cluster(on)
    load = ServingLoad(prompt=1024, output=256)
    return ServingProblem(load_model(model), load, cluster, default_calibration(cluster.chip))


def alone(given, step, layout, wiring, batch):
    """A step of one layout at one place."""
    mesh = {a: float(n) for a, n in layout.sizes.items()}
    sizes = StepSizes(float(batch), *LENGTHS[step], mesh)
    return price_step(given, step, layout.structure, sizes, wires_of(given, given.network, wiring))


@pytest.mark.parametrize(
    ("model", "on", "step"),
    [
        ("deepseek-v2", "h100:16", "prefill"),
        ("mixtral-8x7b", "h100:16", "decode"),
        ("llama-3-8b", "v5e:4x4", "prefill"),
        ("gemma-3-1b", "v5e:4x4", "decode"),
    ],
)
def test_many_places_at_once_take_what_each_takes_alone(model, on, step):
    given = problem(model, on)
    fabric = given.network
    column = np.array([[float(b)] for b in BATCHES])
    random = np.random.default_rng(3)
    for group in candidates(given, fabric, step, (2, 16)):
        wires = PlacedWires(fabric, group.factors, given.routing)
        sizes = StepSizes(column, *LENGTHS[step], group.mesh)
        timed = time_step(given, step, group.structure, sizes, wires, group.places)
        seconds, interval = (np.broadcast_to(v, (len(BATCHES), len(group.places))) for v in timed)
        for i in random.choice(len(group.places), size=min(4, len(group.places)), replace=False):
            for j, batch in enumerate(BATCHES):
                one = alone(given, step, *group.place(i), batch)
                assert seconds[j, i] == pytest.approx(one.expected, rel=1e-12)
                assert interval[j, i] == pytest.approx(one.interval, rel=1e-12)


@pytest.mark.parametrize("step", ["prefill", "decode"])
@pytest.mark.parametrize(("model", "on"), [("llama-3-8b", "v5e:4x4"), ("mixtral-8x7b", "h100:16")])
def test_of_each_place_left_out_another_of_its_mesh_is_as_fast_in_everything(model, on, step):
    given = problem(model, on)
    fabric = given.network
    found = candidates(given, fabric, step, (1, 2, 4, 8, 16))
    table = make_table(given, fabric, step, found, BATCHES, keys={})
    places = [group.place(i) for group in found for i in range(len(group.places))]
    meshes = {layout for layout, _ in places}
    assert table.priced == len(BATCHES) * len(places) > table.rows >= len(BATCHES) * len(meshes)
    left = {}
    for row in range(table.rows):
        layout = table.layout_of(row).replace(wires=None)
        numbers = [table.seconds[row]]
        if step == "prefill":
            numbers += [table.interval[row], table.handover[row]]
        left.setdefault((layout, int(table.batch[row])), []).append(np.array(numbers))
    assert len(left) == len(BATCHES) * len(meshes)
    other = next(layout for layout in meshes if layout.engine_chips == 1)
    random = np.random.default_rng(5)
    for i in random.choice(len(places), size=60, replace=False):
        layout, wiring = places[i]
        for batch in BATCHES:
            costs = alone(given, step, layout, wiring, batch)
            own = [costs.expected]
            if step == "prefill":
                placed = layout.replace(wires=tuple(wiring.items()))
                apart = other.replace(tensor=2) if layout == other else other
                setup = ServingSetup("aggregated", placed, apart, 128, batch)
                own += [costs.interval, cache_transfer_seconds(given, fabric, setup)]
            assert any((numbers <= np.array(own) * (1 + 1e-12)).all() for numbers in left[layout, batch])


@pytest.mark.parametrize("step", ["prefill", "decode"])
def test_layouts_that_nobody_checked_are_right_and_described_as_they_are(step):
    given = problem("mixtral-8x7b", "h100:16")
    for group in candidates(given, given.network, step, (1, 6, 16)):
        assert group.layouts == tuple(ServingLayout.from_json(layout.to_json()) for layout in group.layouts)
        assert {layout.structure for layout in group.layouts} == {group.structure}
        stored = tuple((x.engine_chips, x.weight_ways, x.expert, x.stage) for x in group.layouts)
        assert group.stored == stored
        assert group.chips.tolist() == [layout.engine_chips for layout in group.layouts]
        for i, mesh in enumerate(group.places):
            sizes = group.extents[..., i].prod(axis=1, dtype=int).tolist()
            assert sizes == list(group.layouts[mesh].sizes.values())


def test_a_table_priced_in_blocks_is_that_of_all_at_once(monkeypatch):
    given = problem("mixtral-8x7b", "v5e:4x4")
    found = candidates(given, given.network, "decode", (2, 4, 16))
    tables = []
    for places in (1, 7, 1 << 20):
        monkeypatch.setattr("meshwise.search.serving.tables._PLACES", places)
        tables.append(make_table(given, given.network, "decode", found, BATCHES, prompts=(1, 2), keys={}))
    assert sum(len(list(group.blocks(7))) for group in found) > 2 * len(found)
    *blocked, whole = ({**vars(t), **t.sizes, "prompts": t.prompts[1]} for t in tables)
    order = np.lexsort((whole["batch"], whole["place"]))
    for columns in blocked:
        own = np.lexsort((columns["batch"], columns["place"]))
        for name, column in whole.items():
            if isinstance(column, np.ndarray) and len(column) == len(order):
                told = (columns[name][own], column[order])
                if name in ("stored", "mesh"):  # numbers as they come: what is alike is
                    told = tuple(np.unique(np.stack(pair), axis=1).shape for pair in (told, (told[0], told[0])))
                assert np.array_equal(*told), name
        assert np.array_equal(columns["prompts"], whole["prompts"])
