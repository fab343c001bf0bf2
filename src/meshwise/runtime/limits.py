"""Bounds of what is compiled, for those who must know them without JAX. Not here: what has them."""

#: Alternatives that logprobs can tell beside the token.
MOST_LOGPROBS = 20
