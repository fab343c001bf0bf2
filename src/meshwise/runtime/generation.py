"""Generation, timed: what was compiled, the time to the first token, and that of each after it.

Not here: the program (`generate`), texts (`tokenizer`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from meshwise.runtime.generate import Generator
from meshwise.runtime.loop import in_words
from meshwise.runtime.params import Tree


@dataclass(frozen=True, slots=True)
class Generated:
    """What was generated.

    Args:
        tokens: int32 [sequences, new].
        compile_seconds: that compiling both programs took.
        first_seconds: from the prompt to its first token.
        seconds: of each further token, in all sequences together.
    """

    tokens: np.ndarray
    compile_seconds: float
    first_seconds: float
    seconds: tuple[float, ...]


def generate_timed(
    made: Generator, weights: Tree, prompt: np.ndarray, count: int, progress: Callable[[str], None]
) -> Generated:
    """Generate the most likely tokens, and time each.

    Args:
        made: the program, of room for prompt and new tokens.
        weights: by run and name.
        prompt: int32 [sequences, tokens].
        count: of new tokens, at least 1.
        progress: told a line now and then.

    Raises:
        InfeasibleError: the devices' memory does not suffice.
        MeshwiseError: the devices cannot run the program.
    """
    with in_words():
        progress("compiling")
        begun = time.perf_counter()
        start = jax.ShapeDtypeStruct((), jnp.int32)
        tokens = [jax.ShapeDtypeStruct((len(prompt), n), jnp.int32) for n in (prompt.shape[1], 1)]
        lowered = [made.next_token.lower(made.abstract_weights, made.abstract_cache, t, start) for t in tokens]
        prefill, decode = (program.compile() for program in lowered)
        compiled = time.perf_counter() - begun
        cache = jax.block_until_ready(made.empty_cache())
        rows, times = [], []
        token = np.asarray(prompt, np.int32)
        for i in range(count):
            begun = time.perf_counter()
            program, at = (prefill, 0) if i == 0 else (decode, prompt.shape[1] + i - 1)
            found, cache = program(weights, cache, jnp.asarray(token), jnp.int32(at))
            rows.append(np.asarray(found))
            token = rows[-1][:, None]
            times.append(time.perf_counter() - begun)
            progress(f"token {i + 1:,} of {count:,}: {times[-1]:.3g} s")
    return Generated(np.stack(rows, axis=1), compiled, times[0], tuple(times[1:]))
