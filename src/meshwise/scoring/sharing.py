"""What a training row says that replicas share out, as sizes of mesh axes and a ZeRO stage.

Words of PyTorch, DeepSpeed, Megatron-LM and MaxText. Not here: other words of rows (`training`, `recompute`).
"""

from __future__ import annotations

import math
import re
from typing import Any

from meshwise.core.errors import MeshwiseError
from meshwise.hardware import Chip
from meshwise.scoring.rows import TrainingRun, first_match

#: A source's words for what replicas share -> ZeRO stage; 3 is FSDP. The first that is found counts.
_STAGES = (
    (r"(?:no|not|without|never) re-?shard|reshard_after_forward\s*[=:]?\s*(?:false|never|no)\b", 2),
    (r"no[-_ ]shard\b", 0),
    (r"zero[-_ ]*(?:stage)?[-_ =:]*2|stage 2|^2$|shard_grad_op|optim_grads(?!_params)", 2),
    (r"sharded[-_ ]?ddp\b", 2),
    (r"\bsharded data[-_ ]parallel|dp[-_ ]shard|shard[-_ ]degree", 3),
    (r"zero\+\+|\bmics\b", 3),
    (r"[fh]sdp|zero[-_ ]*(?:stage)?[-_ =:]*3|stage 3|^3$|full(?:y)?[-_ ]shard|hybrid[-_ ]shard|optim_grads_params", 3),
    (r"dist(?:ributed|rib|\.)?[-_ ]*opt|zero[-_ ]*(?:stage)?[-_ =:]*1|stage 1|^1$|sharded optimizer|\boptim\b", 1),
    (r"\bd?dp\b|\bnone\b|no optimizer|zero[-_ ]*(?:stage)?[-_ =:]*0|stage 0|^0$|^no$|data[- ]parallel|replicated", 0),
)

#: Words that deny an offload.
_NO_OFFLOAD = (
    r"\b(?:no|not|non|without)[- ](?:\w+[- ])?offload"
    r"|offload\w*(?:[ =:(]+(?:off|false|disabled)|[ ]?[=:] ?(?:0|no|none|null))\b"
)

#: Words for groups of several copies, each of which shares one.
_HYBRID = r"hybrid|hsdp"


def read_sharing(
    run: TrainingRun, chip: Chip, sizes: dict[str, int], choices: dict[str, Any], notes: list[str]
) -> None:
    """Deal the replicas out between data and fsdp.

    Args:
        run: the row.
        chip: of its cluster.
        sizes: of mesh axes; all replicas stand under data, and are dealt out.
        choices: of the layout, filled.
        notes: what was assumed, filled.

    Raises:
        MeshwiseError: words without a meaning here, or groups that do not divide the replicas.
    """
    words = " ".join(run.fsdp_or_zero_stage.lower().split())
    dp = sizes["data"]
    if not words:
        return
    if "offload" in words and not re.search(_NO_OFFLOAD, words):
        choices["offload"] = ("optimizer", "parameters") if "param" in words else ("optimizer",)
    stage = first_match(_STAGES, words)
    if stage is None:
        raise MeshwiseError(
            f"fsdp_or_zero_stage {run.fsdp_or_zero_stage!r} is not understood; expected DDP, ZeRO stage 1 or 2, or FSDP"
        )
    if stage < 3:
        choices["zero"] = stage
        choices["fully_sharded"] = False
        said = _said(words, dp)
        if stage and said and dp // said > 1:
            notes.append(f"optimizer shared by all {dp} replicas of a stage, where the row says groups of {said}")
        return
    shared = _shared_by(run, words, dp, chip, notes)
    sizes |= {"data": dp // shared, "fsdp": shared}
    choices["zero"] = 1 if shared < dp else 0


def _shared_by(run: TrainingRun, words: str, dp: int, chip: Chip, notes: list[str]) -> int:
    """Replicas that FSDP spreads a copy of the weights over: as the row says, else all, of a hybrid those of a node."""
    said = _said(words, dp)
    if said is None:
        if not re.search(_HYBRID, words):
            return dp
        node = math.gcd(dp, max(math.prod(level.degree for level in chip.scale_up) // (run.tp or 1), 1))
        notes.append(f"hybrid: weights are shared by the {node} replicas of a node")
        return node
    if said % dp == 0:  # of all replicas, or of their devices
        return dp
    if dp % said:
        raise MeshwiseError(
            f"fsdp_or_zero_stage {run.fsdp_or_zero_stage!r}: expected over how many of the {dp} replicas weights are "
            "shared, a divisor: 'FSDP over 8', 'FSDP; DP=2 across nodes'"
        )
    return said


#: Patterns of how many copies there are, and of how many replicas share one.
_ACROSS = r"dp=(\d+) across"
_SHARES = (
    r"within (\d+)-gpu|over (\d+)\b(?! chips)|(?:fsdp|mics) ?[=:(-] ?(\d+)|fsdp (\d+) ?[x\u00d7]|mics (\d+)"
    r"|shard(?:s|ing)?(?:[ _]degree| group| size)*[ =:]+(\d+)|groups? of (\d+)|(\d+)-way"
)
_COPIES = r"\bd?dp ?[=:] ?(\d+)|replicat\w*(?: degree| size)*[ =:]+(\d+)|(\d+) (?:copies|replicas)"


def _said(words: str, dp: int) -> int | None:
    """Over how many replicas a copy is spread, where the words say so, or say how many copies there are."""
    if found := re.search(_ACROSS, words):
        return _share(dp, int(found[1]))
    meshes = re.search(r"(\d+) ?[x\u00d7] ?(\d+)", words)  # copies x shares, as meshes of PyTorch have them
    if meshes and int(meshes[1]) * int(meshes[2]) == dp:
        return int(meshes[2])
    if found := re.search(_SHARES, words):
        return int(next(filter(None, found.groups())))
    if (found := re.search(_COPIES, words)) and re.search(_HYBRID, words):
        return _share(dp, int(next(filter(None, found.groups()))))
    return None


def _share(dp: int, copies: int) -> int:
    """Replicas that share one of so many copies; a number that does not divide `dp` where copies do not."""
    return dp // copies if dp % copies == 0 else dp + 1
