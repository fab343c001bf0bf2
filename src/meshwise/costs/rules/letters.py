"""The letters of the rules, each with one meaning: a letter that two rules share is filled in the same way.

As in the book "How To Scale Your Model": C FLOP/s, W a bandwidth, D and F the widths of a layer, X ways of data or
fully sharded data parallelism, Y ways of tensor parallelism, Z ways of expert parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwise.costs.rules.rule import Letter

LETTERS: Mapping[str, Letter] = {
    # A chip.
    "C": Letter("FLOP/s of a chip", "FLOP/s"),
    "HBM": Letter("HBM of a chip", "bytes"),
    "W_hbm": Letter("HBM bandwidth of a chip", "bytes/s"),
    "W_host": Letter("PCIe or C2C, a chip's share, one way", "bytes/s"),
    "price": Letter("dollars a chip-hour", "$"),
    # Networks.
    "W": Letter("network: of a torus axis, both ways around its ring; of a GPU, into its node", "bytes/s"),
    "W_link": Letter("one link in one direction; on GPUs all links of a GPU", "bytes/s"),
    "W_node": Letter("what the GPUs of a node send to other nodes together", "bytes/s"),
    "W_spine": Letter("what the GPUs of a node send through the outermost switches together", "bytes/s"),
    "W_dcn": Letter("data-center network, a chip's share, one way", "bytes/s"),
    "W_port": Letter("one port of a switch", "bytes/s"),
    "hop": Letter("latency of a hop", "s", 1e-6),
    "hops": Letter("links between two chips; corner to corner unless given"),
    "links": Letter("links of a chip towards the other", default=1),
    "node": Letter("GPUs of a node"),
    "nodes": Letter("nodes"),
    "chips": Letter("chips"),
    "slices": Letter("slices that a data-center network joins", default=1),
    "counts": Letter("chips of the slices that exist", "sizes"),
    "axes": Letter("torus axes that it is spread over", default=1),
    "MX": Letter("torus axes of FSDP", default=1),
    "MY": Letter("torus axes of tensor parallelism", default=1),
    "n": Letter("chips of a ring, or GPUs of a group"),
    "longest": Letter("chips of the longest axis"),
    "switches": Letter("switches", default=1),
    "ports": Letter("ports of a switch"),
    "uplinks": Letter("cables that go up from a switch, or from a switch to each above"),
    "below": Letter("switches below"),
    "above": Letter("switches above"),
    "start": Letter("where the message starts on its axis, from 0", may_be_zero=True),
    "end": Letter("where it goes", may_be_zero=True),
    "ring": Letter("1 where the ends of the axis are joined, else 0", default=1, may_be_zero=True),
    # A model.
    "P": Letter("parameters"),
    "active": Letter("share of the parameters that one token uses", default=1),
    "D": Letter("width of the residual stream"),
    "F": Letter("width of a feed-forward layer, or of an expert"),
    "L": Letter("layers"),
    "N": Letter("query heads"),
    "K": Letter("key/value heads"),
    "H": Letter("width of a head"),
    "V": Letter("vocabulary"),
    "E": Letter("experts", default=1),
    "k": Letter("experts of a token", default=1),
    "kv": Letter("bytes that a token adds to the cache", "bytes"),
    "arrays": Letter("arrays kept a layer", default=1),
    # A job.
    "B": Letter("sequences"),
    "T": Letter("query positions of a sequence"),
    "S": Letter("key positions of a sequence"),
    "tokens": Letter("tokens"),
    "context": Letter("cached positions of a sequence"),
    "outputs": Letter("tokens that a request gains"),
    "mfu": Letter("share of the peak that is reached", "%", 1),
    "b": Letter("bytes a value", "bytes", 2),
    "w": Letter("bytes a weight", "bytes", 2),
    "state": Letter("bytes of optimizer state a parameter", "bytes", 8, may_be_zero=True),
    # A layout.
    "X": Letter("ways of data or fully sharded data parallelism"),
    "Y": Letter("ways of tensor parallelism"),
    "Z": Letter("ways of expert parallelism"),
    "p": Letter("pipeline stages"),
    "m": Letter("microbatches"),
    "split": Letter("chips that a replica of the model is spread over", default=1),
    "ways": Letter("ways in which each axis is split", "sizes"),
    "shape": Letter("sizes of an array", "sizes"),
    # Matrix units.
    "units": Letter("matrix units of a chip"),
    "side": Letter("rows and columns of a matrix unit", default=128),
    "clock": Letter("cycles a second"),
    "I": Letter("rows of the left matrix"),
    "J": Letter("summed size"),
    "J2": Letter("columns of the right matrix"),
    # What comes out.
    "flops": Letter("operations", "FLOPs"),
    "bytes": Letter("bytes", "bytes"),
    "bytes_through": Letter("bytes through the switches", "bytes"),
    "intensity": Letter("operations a byte"),
    "t": Letter("time", "s"),
    "t_prefill": Letter("time of a prefill", "s"),
    "t_step": Letter("time of a decode step", "s"),
    "rate": Letter("bytes a second", "bytes/s"),
    "FLOP_rate": Letter("operations a second", "FLOP/s"),
    "per_dollar": Letter("operations a dollar", "FLOPs"),
    "per_chip": Letter("tokens of a chip"),
    "per_second": Letter("a second"),
    "share": Letter("a share"),
    "local": Letter("sizes of a chip's block", "sizes"),
    "mix": Letter("ways of FSDP x ways of tensor parallelism", "sizes"),
    "engines": Letter("engines that prefill for one that decodes"),
}
