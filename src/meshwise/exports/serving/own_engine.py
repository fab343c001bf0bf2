"""What `meshwise serve` cannot execute of a plan, as a table of rules beside those of other engines.

Not here: executing it (`engine`), or writing it for other engines.
"""

from __future__ import annotations

import math

from meshwise.core.dtypes import DType
from meshwise.core.errors import MeshwiseError
from meshwise.exports.exported import Rule
from meshwise.exports.serving.choices import Engine, EngineRules, formats_of, whole_experts, whole_heads
from meshwise.runtime.refusals import HELD, PAGE_TOKENS, SERVED, check_model
from meshwise.sharding.serving import SERVING_AXES

TITLE = "meshwise serve"


def _why(engine: Engine) -> str:
    """What execution says of the model, "" where it has no objection."""
    try:
        check_model(engine.model)
    except MeshwiseError as error:
        return str(error)
    return ""


def _no_axis(name: str) -> Rule[Engine]:
    def size(c: Engine) -> int:
        return int(getattr(c.layout, name))

    return Rule(
        lambda c: size(c) > 1,
        lambda c: f"{name}={size(c)}",
        f"its engine splits over {', '.join(SERVED)}",
        f"tensor with replicas, or plan serve --forbid {name}",
    )


def _expert_ways(engine: Engine) -> int:
    """Devices that share out whole experts."""
    return engine.layout.expert * engine.weight_chips


#: Weights, and operands of their products -> how they are asked for.
_NARROW = {(w, c): f"--quantization {w.value}" for w in (DType.INT8, DType.FP8) for c in reversed(HELD)}

#: What it cannot execute.
RULES: EngineRules = (
    whole_heads(copies=False),
    *(_no_axis(axis) for axis in SERVING_AXES if axis not in SERVED),
    Rule(
        lambda c: c.layout.cache > 1 and c.layout.cache_split != "sequence",
        "cache_split={c.layout.cache_split}", "it spreads a cache's positions, not its requests",
        "cache_split=sequence",
    ),
    Rule(
        lambda c: PAGE_TOKENS % c.layout.cache > 0,
        "cache={c.layout.cache}", f"its pages of {PAGE_TOKENS} tokens do not divide over it",
        lambda c: f"cache={math.gcd(PAGE_TOKENS, c.layout.cache)}",
    ),
    Rule(
        lambda c: c.mixture and not c.layout.expert_tensor_parallel and c.experts % _expert_ways(c) > 0,
        "expert_tensor_parallel=off", lambda c: f"{c.experts} experts do not divide over {_expert_ways(c)} devices",
        "expert_tensor_parallel=on",
    ),
    whole_experts(lambda c: c.layout.expert),
    Rule(
        lambda c: c.layout.sequence_parallel and c.weight_chips > 1,
        "sequence_parallel=on", "it holds the residual stream whole on each device", "sequence_parallel=off",
    ),
    Rule(lambda c: bool(_why(c)), "model {c.model.name}", _why, "another engine"),
    Rule(
        lambda c: c.chip.devices_per_chip > 1,
        "chip {c.chip.title}", "JAX sees several devices in each", "a chip with one device",
    ),
    Rule(
        lambda c: c.load.longest > (c.model.max_seq_len or math.inf),
        lambda c: f"requests of {c.load.longest:,.0f} tokens", "it reads no further than {c.model.max_seq_len:,}",
        "shorter requests",
    ),
    Rule(
        lambda c: c.load.draft_tokens > 0,
        "draft_tokens={c.load.draft_tokens}", "it does not speculate", "--draft-tokens 0",
    ),
    Rule(
        lambda c: c.load.formats.activations not in HELD,
        "activations={c.load.formats.activations.value}", "it computes in bf16 or fp32", "bf16",
    ),
    Rule(
        lambda c: not c.wide and c.mixture,
        "weights={c.formats[0].value}", "it holds experts' weights as wide as activations",
        "{c.load.formats.activations.value}",
    ),
    Rule(
        lambda c: c.load.formats.head is not c.load.formats.activations,
        "head={c.load.formats.head.value}", "it holds embedding and head as wide as activations",
        "head={c.load.formats.activations.value}",
    ),
    *formats_of(_NARROW, (), none="it holds no weights so", kv="kv as activations are"),
)  # fmt: skip
