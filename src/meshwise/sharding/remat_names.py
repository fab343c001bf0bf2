"""What users write after `remat=`: our own names, JAX's and Megatron-LM's, with how many layers, as one request.

Not here: what a policy keeps (`remat`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshwise.core.errors import LayoutError
from meshwise.sharding.remat import remat_policy

#: Other spelling -> policy. The first are those of `jax.checkpoint_policies`, the last Megatron-LM's.
REMAT_ALIASES = {
    "everything_saveable": "none",
    "nothing_saveable": "full",
    "dots_saveable": "matmuls",
    "checkpoint_dots": "matmuls",
    "dots_with_no_batch_dims_saveable": "projections",
    "checkpoint_dots_with_no_batch_dims": "projections",
    "off": "none",
    "uniform": "full",
    "block": "full",
}

_CALLS = {
    "save_only_these_names": "save",
    "save_any_names_but_these": "recompute",
    "save_and_offload_only_these_names": "save",
}


@dataclass(frozen=True, slots=True)
class RematRequest:
    """What was asked for.

    Args:
        policy: as `remat_policy` takes it.
        layers: how many layers follow it; None where that was not said.
        of_each_stage: whether `layers` counts those of one stage, or piece of a stage, of the pipeline.
        offloads: whether what is kept goes to the host.
    """

    policy: str
    layers: int | None = None
    of_each_stage: bool = False
    offloads: bool = False


def parse_remat(text: str) -> RematRequest:
    """Read a remat policy as users write it.

    >>> parse_remat("full:40")
    RematRequest(policy='full', layers=40, of_each_stage=False, offloads=False)
    >>> parse_remat("save_only_these_names('attention', 'o')").policy
    'save:attention+o'
    >>> parse_remat("selective:core_attn+layernorm").policy, parse_remat("dots_saveable").policy
    ('recompute:core_attn+layernorm', 'matmuls')

    Args:
        text: a policy, or `save:` or `recompute:` and a list of operations, each with `:n` after it where only n
            layers follow it; JAX's names; Megatron-LM's `selective`, with a list of modules or without, `uniform` and
            `block:n` (n layers of each stage).

    Raises:
        LayoutError: what has no meaning here, and why.
        UnknownNameError: with the names there are.
    """
    found = re.fullmatch(r"\s*([a-z_0-9]+)\s*\((.*)\)\s*(?::\s*(\d+))?\s*", text.lower())
    if found is not None and found[1] in _CALLS:
        names = re.sub(r"[\s'\"\[\]]", "", found[2]).replace(",", "+").strip("+")
        return _request(f"{_CALLS[found[1]]}:{names}", found[3], offloads="offload" in found[1])
    name, *rest = re.sub(r"\s", "", text.lower()).split(":")
    name = "recompute" if name == "selective" and rest and not rest[0].isdigit() else name
    if name in ("save", "recompute"):
        name = f"{name}:{rest.pop(0).replace(',', '+') if rest else ''}"
    if len(rest) > 1:
        raise LayoutError(f"layout: expected remat=POLICY or remat=POLICY:LAYERS, found remat={text}")
    count = rest[0] if rest else None
    if count is not None and not re.fullmatch(r"[0-9]+", count):
        raise LayoutError(f"layout: expected a number of layers after remat={name}:, found {count!r}")
    if name == "uniform" and count not in (None, "1"):
        raise LayoutError(
            f"layout: remat={text} keeps one input for every {count} layers, which is not modelled; use remat=full "
            "(uniform:1), or remat=full:LAYERS for fewer layers"
        )
    if name == "block" and count is None:
        raise LayoutError("layout: remat=block needs the layers of each stage that are recomputed, as in remat=block:4")
    return _request(REMAT_ALIASES.get(name, name), None if name == "uniform" else count, of_each_stage=name == "block")


def _request(policy: str, count: str | None, **how: bool) -> RematRequest:
    remat_policy(policy)  # checks the name
    return RematRequest(policy, None if count is None else int(count), **how)
