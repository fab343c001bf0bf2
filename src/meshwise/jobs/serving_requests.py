"""Requests of a serving load, drawn at a rate. Not here: what they are on average (`serving`)."""

from __future__ import annotations

from meshwise.core.errors import MeshwiseError
from meshwise.jobs.serving import ServingLoad
from meshwise.jobs.traffic.arrivals import Arrivals
from meshwise.jobs.traffic.lengths import Fixed, Lengths, Uniform, parse_lengths
from meshwise.jobs.traffic.load import DrawnLoad, SharedPrefixes


def computed_lengths(load: ServingLoad) -> Lengths:
    """Give lengths of what comes after the beginning of prompts that is cached already.

    Raises:
        MeshwiseError: the load's requests were recorded.
    """
    first = int(load.cached_prefix)
    if load.mix is None:
        return Fixed(int(load.computed))
    if load.mix.prompt is None:
        raise MeshwiseError(f"the load's requests were {load.mix.words}: they cannot be drawn, give the file (--csv)")
    lengths = parse_lengths(load.mix.prompt)
    if isinstance(lengths, Uniform):
        return Uniform(lengths.least - first, lengths.most - first)
    return Fixed(lengths.tokens - first) if isinstance(lengths, Fixed) else lengths  # others begin with nothing cached


def output_lengths(load: ServingLoad) -> Lengths:
    """Give lengths of outputs.

    Raises:
        MeshwiseError: the load's requests were recorded.
    """
    if load.mix is None:
        return Fixed(int(load.output))
    if load.mix.output is None:
        raise MeshwiseError(f"the load's requests were {load.mix.words}: they cannot be drawn, give the file (--csv)")
    return parse_lengths(load.mix.output)


def drawn_requests(load: ServingLoad, rate: float, count: int, seed: int = 0) -> DrawnLoad:
    """Draw requests of a load that arrive at random (Poisson).

    >>> drawn = drawn_requests(ServingLoad(prompt=1024, output=64, cached_prefix=256), rate=2.0, count=3)
    >>> [(d.prompt, d.output, d.prefix) for d in drawn.requests()][0]
    (1024, 64, (('prefix 0', 256),))

    Args:
        load: the load.
        rate: requests per second.
        count: how many.
        seed: of the draws.

    Raises:
        MeshwiseError: the load's requests were recorded.
    """
    shared = SharedPrefixes(int(load.cached_prefix)) if load.cached_prefix else None
    return DrawnLoad(Arrivals(rate), computed_lengths(load), output_lengths(load), count, seed, shared)
