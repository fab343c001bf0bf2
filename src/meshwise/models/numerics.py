"""What execution needs of a model besides its program: activation functions, epsilons, rotations, scales, routing.

None of it changes a count. Not here: reading it from a configuration (`numeric_readers`), executing anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from meshwise.models.spec import Router


@dataclass(frozen=True, slots=True)
class Scaling:
    """How rotary frequencies are stretched beyond the positions that a model was first trained on.

    Args:
        kind: "linear" divides all of them; "llama3" only slow ones, with a smooth passage; "yarn" by a ramp over the
            rotations that each makes in `original` positions (Peng et al. 2023).
        factor: of the stretch.
        original: positions before it.
        low, high: bounds of the passage: rotations within `original` positions (llama3: factors of the wave length).
        attention: factor of the rotated values (yarn's temperature), or 1.
        truncate: whether yarn rounds its bounds to whole dimensions.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original: float = 0.0
    low: float = 1.0
    high: float = 4.0
    attention: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class Rotary:
    """How positions are rotated into queries and keys.

    Args:
        theta: base of the frequencies.
        share: of a head's width that is rotated, its first part.
        interleaved: whether neighbours form a pair, else halves.
        scaling: of the frequencies, or None.
    """

    theta: float = 10_000.0
    share: float = 1.0
    interleaved: bool = False
    scaling: Scaling | None = None


@dataclass(frozen=True, slots=True)
class Numerics:
    """What execution needs besides the program.

    Args:
        order: name of the block of each layer, in order; a program groups equal ones.
        activation: function of feed-forward parts: silu, gelu, gelu_tanh, relu, relu2, or swiglu_oai, which is
            g sigmoid(1.702 g) (u + 1) of the gate g and the other input u (gpt-oss).
        norm_epsilon: added to variances.
        latent_epsilon: likewise, in the norms of latents.
        norm_centred: whether norms subtract the mean (layer norms).
        norm_offset: added to the weight of a norm (Gemma stores w - 1).
        rotary: block -> rotation; blocks without positions have none.
        attention_scale: block -> factor of q . k.
        attention_cap: c of c tanh(x / c) on attention logits, or None.
        logits_cap, logits_scale: likewise on the head's logits; a factor of them.
        embedding_scale: factor of embedded tokens.
        router: of mixtures.
        clamp: bound of a gated feed-forward's two inputs: of the gate from above, of the other from both sides; None
            for none.
    """

    order: tuple[str, ...]
    activation: str = "silu"
    norm_epsilon: float = 1e-5
    latent_epsilon: float = 1e-6
    norm_centred: bool = False
    norm_offset: float = 0.0
    rotary: Mapping[str, Rotary] = field(default_factory=dict)
    attention_scale: Mapping[str, float] = field(default_factory=dict)
    attention_cap: float | None = None
    logits_cap: float | None = None
    logits_scale: float = 1.0
    embedding_scale: float = 1.0
    router: Router = field(default_factory=Router)
    clamp: float | None = None
