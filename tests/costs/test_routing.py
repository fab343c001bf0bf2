"""Where tokens go: every choice of experts enumerated, and every copy followed over the network."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.core.errors import MeshwiseError
from meshwise.costs.fabric import Fabric
from meshwise.costs.network import make_group_link
from meshwise.costs.routing import Routing
from meshwise.hardware import parse_cluster

ROUTINGS = [
    Routing(8, 3),
    Routing(8, 1),
    Routing(6, 6),
    Routing(12, 4, groups=4, groups_limit=2),
    Routing(12, 3, groups=6, groups_limit=3),
    Routing(16, 4, groups=8, groups_limit=4),
]


def choices(routing):
    """Every set of experts that a token may go to, each as likely as it is often listed."""
    width = routing.experts // routing.groups
    for groups in itertools.combinations(range(routing.groups), routing.groups_limit):
        within = [g * width + e for g in groups for e in range(width)]
        yield from itertools.combinations(within, routing.top_k)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_distinct_destinations_are_those_of_all_choices(routing):
    sets = list(choices(routing))
    for parts in (n for n in range(1, routing.experts + 1) if routing.experts % n == 0):
        held, group = routing.experts // parts, routing.experts // routing.groups
        if held % group and group % held:
            continue  # neither nests in the other
        mean = sum(len({e // held for e in chosen}) for chosen in sets) / len(sets)
        assert routing.distinct(parts) == pytest.approx(mean, rel=1e-12), parts


def followed(routing, extents, chosen):
    """Bytes that each chip sends into each level, [levels, chips], when every chip has a token of one byte."""
    members = list(itertools.product(*(range(e) for e in reversed(extents))))  # outermost first
    held = routing.experts // len(members)
    levels = len(extents)
    sent = np.zeros((levels, len(members)))
    index = {m: i for i, m in enumerate(members)}
    for source in members:
        goals = {members[e // held] for e in chosen}
        for domain in {g[:-1] for g in goals}:
            relay = (*domain, source[-1])
            if relay != source:
                for level in range(1, levels):  # a port carries what leaves the child, however far it goes
                    if relay[: levels - level] != source[: levels - level]:
                        sent[level, index[source]] += 1
            sent[0, index[relay]] += sum(1 for g in goals if g[:-1] == domain and g != relay)
    return sent


@pytest.mark.parametrize(
    ("routing", "extents"),
    [
        (Routing(8, 3), (2, 4)),
        (Routing(8, 3), (4, 2)),
        (Routing(8, 2), (8, 1)),
        (Routing(8, 2), (1, 4)),
        (Routing(16, 4, groups=8, groups_limit=4), (2, 4)),
        (Routing(12, 3, groups=6, groups_limit=3), (2, 3)),
        (Routing(8, 3), (2, 2, 2)),
    ],
)
def test_routed_bytes_are_those_of_every_copy_followed(routing, extents):
    fabric = Fabric.of(parse_cluster("h100:192" if len(extents) == 2 else "h100:16384@meta-roce"))
    sets = list(choices(routing))
    n = math.prod(extents)
    mean = sum(followed(routing, extents, chosen) for chosen in sets) / len(sets)
    # By symmetry over experts each chip sends the same in the mean; a token has 1 byte, all slots top_k * n.
    seconds = max(mean[i].mean() / d.bandwidth_one_way for i, d in enumerate(fabric.dimensions))
    wire = make_group_link(fabric, {"expert": [float(e) for e in extents]}, ("expert",), routing=routing)
    assert wire.routed * routing.top_k * n == pytest.approx(seconds, rel=1e-12)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["h100:128", "gb200:288", "h100:16384@meta-roce", "v5p:4x4x8", "v5p:4x4x4*4"]),
    st.sampled_from([Routing(64, 4), Routing(256, 8), Routing(256, 8, groups=8, groups_limit=4), Routing(128, 1)]),
    st.data(),
)
def test_one_copy_for_each_destination_never_costs_more_than_one_for_each_expert(name, routing, data):
    fabric = Fabric.of(parse_cluster(name))
    extents = [data.draw(st.sampled_from([e for e in (1, 2, 4, 8) if d.size % e == 0])) for d in fabric.dimensions]
    if math.prod(extents) > routing.experts:
        return
    factors = {"expert": [float(e) for e in extents]}
    wire = make_group_link(fabric, factors, ("expert",), routing=routing)
    assert 0 <= wire.routed <= wire.exchange * (1 + 1e-12)
    if routing.top_k == 1 and fabric.dimensions[0].torus:
        assert wire.routed == pytest.approx(wire.exchange, rel=1e-12)
    arrays = {"expert": [np.array([1.0, e, e]) for e in extents]}
    column = make_group_link(fabric, arrays, ("expert",), routing=routing).routed
    assert list(column[1:]) == [wire.routed, wire.routed]
    assert column[0] == 0


def test_without_a_routing_every_slot_travels():
    wire = make_group_link(Fabric.of(parse_cluster("h100:64")), {"expert": [8.0, 8.0]}, ("expert",))
    assert wire.routed == wire.exchange


def test_deepseek_v3_sends_to_fewer_nodes_than_experts():
    # 256 experts on 64 chips, 8 of them a token: at most 4 nodes (DeepSeek-V3 report), 3.63 in the mean.
    limited, free = Routing(256, 8, groups=8, groups_limit=4), Routing(256, 8)
    assert limited.distinct(8) == pytest.approx(8 * 0.5 * (1 - math.comb(96, 8) / math.comb(128, 8)))
    assert free.distinct(8) == pytest.approx(8 * (1 - math.comb(224, 8) / math.comb(256, 8)))


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((8, 9), "expected 1 to 8 experts a token, found 9"),
        ((8, 2, 3), "8 experts do not divide into 3 equal groups"),
        ((8, 2, 4, 5), "expected a limit of 1 to 4 groups, found 5"),
        ((8, 3, 4, 1), "3 experts a token do not fit in 1 groups of 2"),
    ],
)
def test_routers_that_cannot_be(numbers, message):
    with pytest.raises(MeshwiseError, match=message):
        Routing(*numbers)
