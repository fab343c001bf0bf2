"""Small models, batches and weights drawn with NumPy, and their loss and gradients on any layout."""

from functools import cache

import jax
import numpy as np

from meshwise.jobs import TrainingJob
from meshwise.models import read_config, read_dimensions
from meshwise.runtime import train_step
from meshwise.sharding.layout import Layout

LENGTH = 16
DENSE = "D=32 F=64 L=3 N=8 K=4 H=8 V=64"


@cache
def dense(text=DENSE):
    return read_dimensions(text, name="small")


_MODELS = {}


def configured(name, config):
    """The model of a configuration, the same value each time."""
    return _MODELS.setdefault(name, read_config(config, name=name))


def make(model, layout, length=LENGTH, *, documents=False, **job):
    given = {"precision": "fp32", **job}
    job = TrainingJob(batch_tokens=layout.sequences * length, seq_len=length, **given)
    return train_step(model, layout, job, jax.devices()[: layout.num_chips], documents=documents)


def batch_of(step, seed=0):
    """Tokens and labels of a batch; those of a larger one begin with them."""
    shape = step.abstract_batch["tokens"].shape
    return _placed(step, _drawn(step, shape[0] * shape[1], seed))


def _drawn(step, sequences, seed=0):
    size = sequences, step.abstract_batch["tokens"].shape[-1] + 1
    return np.random.default_rng(seed).integers(0, step.stack.program.sizes["V"], size).astype(np.int32)


def _placed(step, drawn):
    parts = {"tokens": drawn[:, :-1], "labels": drawn[:, 1:], "documents": documents_of(drawn[:, :-1])}
    abstract = step.abstract_batch
    return {k: jax.device_put(parts[k].reshape(a.shape), a.sharding) for k, a in abstract.items()}


def documents_of(tokens):
    """Where the document of each token begins, if every fourth one of the vocabulary ends one."""
    begins = np.zeros_like(tokens)
    for row, own in zip(begins, tokens, strict=True):
        for end in np.flatnonzero(own % 4 == 0) + 1:
            row[end:] = end
    return begins


def layers_of(step):
    """Run -> numbers of its layers among those of its block, in the order in which they are stacked."""
    numbers, seen = {}, {}
    stages, pieces = step.layout.stage, step.layout.virtual_stages
    for place in [(stage, piece) for piece in range(pieces) for stage in range(stages)]:
        for segment in step.stack.segments:
            for _ in range(segment.times):
                for run in segment.runs:
                    for _ in range(run.count):
                        found = numbers.setdefault(run.key, (run.block, {}))[1]
                        found.setdefault(place, []).append(seen.setdefault(run.block, 0))
                        seen[run.block] += 1
    return {
        key: (block, [n for place in sorted(found) for n in found[place]]) for key, (block, found) in numbers.items()
    }


def weights_of(step, seed=0):
    """Weights that depend on block, layer and name alone; spread enough for every path to matter."""
    numbers, drawn = layers_of(step), {}
    for key, run in step.parameters.items():
        drawn[key] = {}
        block, layers = numbers.get(key, (key, [0]))
        for name, p in run.items():
            own = p.shape[len(p.stack) :]
            seeds = [[seed, layer, *block.encode(), *name.encode()] for layer in layers]
            value = np.stack([np.random.default_rng(s).normal(size=own) for s in seeds]).reshape(p.shape)
            value = value * (p.scale or 0.3) + (0 if p.scale else p.constant)
            abstract = step.abstract_state["weights"][key][name]
            drawn[key][name] = jax.device_put(value.astype(np.float32), abstract.sharding)
    return drawn


def loss_and_gradients(step, weights=None):
    """The loss, and the gradient of every weight by "block/weight", layers in their order in front."""
    loss, gradients = step.gradients(weights or weights_of(step), batch_of(step))
    return float(loss), by_path(step, gradients)


def by_path(step, gradients):
    found = by_layer(step, gradients)
    return {f"{block}/{name}": g for block, run in found.items() for name, g in run.items()}


def state_of(step, seed=0):
    """A training state of the weights of `weights_of`, without drawing any in JAX."""
    weights = weights_of(step, seed)
    zeros = jax.tree.map(lambda a: jax.device_put(np.zeros(a.shape, a.dtype), a.sharding), step.abstract_state)

    def cast(part):
        own = {key: {name: weights[key][name] for name in run} for key, run in zeros[part].items()}
        return jax.tree.map(lambda w, a: jax.device_put(np.asarray(w).astype(a.dtype), a.sharding), own, zeros[part])

    return {**zeros, **{part: cast(part) for part in ("weights", "master") if part in zeros}}


def by_layer(step, tree):
    """Block -> name -> [layers, ...], from arrays by run and name."""
    numbers, found = layers_of(step), {}
    for key, run in tree.items():
        block, layers = numbers.get(key, (key, [0]))
        for name, array in run.items():
            p = step.parameters[key][name]
            each = np.asarray(array).reshape(len(layers), *p.shape[len(p.stack) :])
            found.setdefault(block, {}).setdefault(name, {}).update(zip(layers, each, strict=True))
    return {b: {n: np.stack([each[i] for i in sorted(each)]) for n, each in run.items()} for b, run in found.items()}


@cache
def alone(model, sequences, length=LENGTH, *, documents=False):
    """Loss and gradients of a batch on one device, nothing recomputed: the means of those of its sequences.

    So that one program does for batches of any size.
    """
    step, weights = _of_one_sequence(model, length, documents)
    batches = (_placed(step, one[None]) for one in _drawn(step, sequences))
    losses, gradients = zip(*(step.gradients(weights, batch) for batch in batches), strict=True)
    return float(np.mean(losses)), by_path(step, jax.tree.map(lambda *each: np.mean(each, axis=0), *gradients))


@cache
def _of_one_sequence(model, length, documents):
    step = make(model, Layout(remat="none"), length, documents=documents)
    return step, weights_of(step)


def worst(found, expected):
    """Largest difference of any gradient, relative to the largest entry of that gradient."""
    assert found.keys() == expected.keys()
    return max(np.abs(found[k] - expected[k]).max() / max(np.abs(expected[k]).max(), 1e-3) for k in expected)
