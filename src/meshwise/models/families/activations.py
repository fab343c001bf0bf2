"""Activations that configurations name: known functions of one input, and those that would make a layer gated.

Whether a feed-forward is gated is for its family to say. Not here: what an activation costs (`build`).
"""

from __future__ import annotations

import difflib

from meshwise.core.errors import ConfigError

#: Spellings of the key.
ACTIVATION_KEYS = frozenset(
    {"hidden_act", "hidden_activation", "activation_function", "activation_type", "activation", "act_fn"}
)

#: Functions without parameters of their own, by every spelling that is common.
ACTIVATIONS = (
    "gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh",
    "gelu_pytorch_tanh", "gelu_tanh", "leaky_relu", "linear", "mish", "quick_gelu", "relu", "relu2", "relu6",
    "relu_squared", "sigmoid", "silu", "squared_relu", "swish", "tanh",
)  # fmt: skip

#: Names of a gated layer's activation.
GATED_ACTIVATIONS = ("geglu", "reglu", "swiglu")


def check_activation(key: str, value: object, *, gated: bool) -> None:
    """Refuse an activation that is not known, or that would make gated what is not.

    Args:
        key: as the configuration spells it.
        value: what it says; null says nothing.
        gated: whether every feed-forward layer of the model is gated.

    Raises:
        ConfigError: names the activations that are known.
    """
    name = value.lower() if isinstance(value, str) else value
    known = (*ACTIVATIONS, *GATED_ACTIVATIONS) if gated else ACTIVATIONS
    if value is None or name in known:
        return
    if name in GATED_ACTIVATIONS:
        raise ConfigError(
            f"key {key!r}: {value!r} would make the feed-forward layers gated, and this model_type's are not; "
            f"expected one of {', '.join(known)}"
        )
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.75)
    hint = f" (nearest: {near[0]})" if near else ""
    raise ConfigError(f"key {key!r}: expected one of {', '.join(known)}; found {value!r:.60}{hint}")
