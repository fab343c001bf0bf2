"""The ragged AllToAll from its documentation, out of gathers, whose gradients follow, for platforms without it."""

import jax
import jax.numpy as jnp


def ragged_all_to_all(  # noqa: PLR0917 -- as the primitive takes them
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """What each device sends from `input_offsets` stands at `output_offsets` of its receiver, slice by slice."""
    here = jax.lax.axis_index(axis_name)
    sent = jax.lax.all_gather(operand, axis_name)
    starts, sizes, places = (jax.lax.all_gather(x, axis_name) for x in (input_offsets, send_sizes, output_offsets))
    rows = jnp.arange(output.shape[0])
    slices = len(recv_sizes) // len(sent)
    for number in range(len(recv_sizes)):
        source, own = number // slices, here * slices + number % slices
        start, size, place = (x[source, own] for x in (starts, sizes, places))
        size = jnp.where(size == recv_sizes[number], size, 0)  # both ends must agree
        within = (rows >= place) & (rows < place + size)
        taken = sent[source][jnp.clip(start + rows - place, 0, operand.shape[0] - 1)]
        output = jnp.where(within.reshape(-1, *[1] * (output.ndim - 1)), taken, output)
    return output
