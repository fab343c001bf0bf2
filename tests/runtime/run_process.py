"""One of two processes with four devices each: prints the loss and the size of every gradient.

Arguments: address of the first process, and this one's number.
"""

# ruff: noqa: E402 -- devices are asked for before JAX is imported

import os
import sys

FLAGS = (
    "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
)
os.environ |= {"XLA_FLAGS": FLAGS, "JAX_PLATFORMS": "cpu", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}

import json

import jax
import jax.numpy as jnp

address, number = sys.argv[1:]
jax.distributed.initialize(address, num_processes=2, process_id=int(number))

from meshwise.sharding.layout import Layout
from tests.runtime.steps import batch_of, dense, make, weights_of

assert len(jax.devices()) == 8
assert len(jax.local_devices()) == 4
step = make(dense("D=32 F=64 L=2 N=4 K=2 H=8 V=64"), Layout(data=2, fsdp=2, tensor=2, num_microbatches=2))
loss, gradients = step.gradients(weights_of(step), batch_of(step))
sizes = jax.jit(lambda g: jax.tree.map(lambda x: jnp.sqrt(jnp.sum(x * x)), g), out_shardings=loss.sharding)(gradients)
print(json.dumps({"loss": float(loss), "sizes": jax.tree.map(float, sizes)}))  # noqa: T201
