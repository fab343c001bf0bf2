"""What rings, switches and links carry, and in what time. `bytes` are of the whole array, unless said otherwise."""

from __future__ import annotations

from meshwise.costs.rules.table import rule

NETWORKS = (
    rule(
        "ring-all-gather",
        "t = floor(n/2) * max(hop, bytes/n/W_link)",
        "time of an AllGather, or a ReduceScatter, around a ring, both ways at once",
        'Sharded matrices, "AllGather", question 3',
        note="an AllReduce takes twice as long",
    ),
    rule(
        "one-way-all-gather",
        "t = (n - 1) * max(hop, bytes/n/W_link)",
        "time of an AllGather, or a ReduceScatter, one way around, or along a line whose ends are not joined",
        'Sharded matrices, "AllGather"',
    ),
    rule(
        "ring-time",
        "t = bytes / (axes*W)",
        "time of an AllGather, or a ReduceScatter, bound by bandwidth, over one or more axes that are rings",
        'Sharded matrices, "AllGather", question 2',
        note="an AllReduce takes twice as long",
    ),
    rule(
        "link-time",
        "t = bytes / (links*W_link)",
        "time of bytes over links in one direction, latency left out",
        'Rooflines, "where does the time go"',
    ),
    rule(
        "all-to-all",
        "t = bytes*longest / (4*chips*W)",
        "time of an AllToAll on a torus: its longest axis binds",
        'Sharded matrices, "AllToAll"',
        note="a quarter of an AllGather's time on one ring",
    ),
    rule(
        "all-gather-node",
        "t = (n - 1)/n * bytes/W",
        "time of an AllGather, or a ReduceScatter, among GPUs on switches",
        'GPUs, "collectives"',
    ),
    rule(
        "all-to-all-node",
        "t = bytes*(n - 1) / (n**2*W)",
        "time of an AllToAll among GPUs on switches",
        'GPUs, "AllToAll"',
    ),
    rule(
        "latency-bound",
        "bytes = n*W_link*hop",
        "array under which an AllGather takes as long as its hops do",
        'Inference, appendix on latency; Sharded matrices, "latency"',
    ),
    rule(
        "axis-hops",
        "hops = min(abs(end - start), n - abs(end - start)) if ring else abs(end - start)",
        "links between two chips along one axis of a torus; those of several axes add up",
        "TPUs, question 5",
    ),
    rule(
        "send",
        "t = hops*hop + bytes/(links*W_link)",
        "time until one chip has the bytes of another",
        "TPUs, question 5",
        note="the bytes are split over as many ways as the chips have links towards each other",
    ),
    rule(
        "host-transfer",
        "t = bytes / (chips*W_host)",
        "time of an array from hosts to chips, each its own part",
        "TPUs, question 6",
        chips=1,
    ),
    rule(
        "dcn-transfer",
        "t = bytes / (chips*W_dcn)",
        "time of an array through the data-center network, a part from each chip",
        "TPUs, question 6",
        chips=1,
    ),
    rule(
        "pipelined-transfer",
        "t = max(bytes/(chips*W_host), bytes*(chips - 1)/chips/(links*W_link), bytes/W_hbm, flops/C)",
        "time of an array over PCIe to all chips, over links to one, through its HBM and its arithmetic, all at once",
        "TPUs, question 6",
        links=2,
    ),
    rule(
        "switch-rate",
        "rate = switches*ports*W_port",
        "bytes a second through switches",
        'GPUs, "networking"',
    ),
    rule(
        "node-rate",
        "rate = min(switches*ports*W_port, n*W)",
        "bytes a second among the GPUs of a node: what its switches pass, or what the GPUs send",
        'GPUs, "networking", question 1',
    ),
    rule(
        "level-rate",
        "rate = below*above*uplinks*W_port",
        "bytes a second between two levels of switches, each below with so many cables to each above",
        'GPUs, "networking"',
    ),
    rule(
        "node-ingress",
        "bytes_through = bytes/nodes + bytes*(nodes - 1)/nodes",
        "bytes into the switches of a node in an AllGather over nodes: from its GPUs, and from the other nodes",
        'GPUs, "collectives", question 1',
    ),
    rule(
        "node-egress",
        "bytes_through = bytes/nodes + n*(bytes - bytes/(nodes*n))",
        "bytes out of the switches of a node in an AllGather over nodes: to the other nodes, and to its GPUs",
        'GPUs, "collectives", question 1',
    ),
    rule(
        "spine-egress",
        "bytes_through = nodes * bytes*(nodes - 1)/nodes",
        "bytes out of the switches above the nodes in an AllGather",
        'GPUs, "collectives", question 1',
    ),
    rule(
        "switches-above",
        "switches = ceil(below*uplinks/ports)",
        "switches that take all cables of those below",
        'GPUs, "networking"',
    ),
)
