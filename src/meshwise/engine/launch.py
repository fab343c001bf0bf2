"""Engines made of a model, its weights and their limits: devices, memory, programs. It loads JAX.

Not here: what is asked for (`commands`), the endpoint (`http`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

from meshwise.core.dtypes import DType
from meshwise.core.errors import ClusterError, InfeasibleError, LayoutError
from meshwise.core.units import format_bytes
from meshwise.engine.constraints import is_installed
from meshwise.engine.executor import JaxExecutor
from meshwise.models import Model
from meshwise.runtime.devices import find_devices, software_of
from meshwise.runtime.layered import LayeredModel
from meshwise.runtime.loop import in_words
from meshwise.runtime.processes import least
from meshwise.runtime.refusals import PAGE_TOKENS
from meshwise.runtime.saved import find_weights
from meshwise.runtime.steps import PagedModel, paged_model
from meshwise.scheduling import Scheduling
from meshwise.sharding.serving import ServingLayout

#: Share of a device's memory for weights and cache.
_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine is to be able to do; None: as fits the devices.

    Args:
        max_batch, max_step_tokens, policy, prefix_cache: as in `Scheduling`.
        max_len: tokens of a request, prompt and output together.
        cache_bytes: of keys and values on all devices.
    """

    policy: str = "prefill-first"
    prefix_cache: bool = True
    max_batch: int | None = None
    max_step_tokens: int | None = None
    max_len: int | None = None
    cache_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """Engines of one kind that are asked for.

    Args:
        layout: of one of them.
        replicas: how many.
        limits: see there.
    """

    layout: ServingLayout
    replicas: int
    limits: Limits


@dataclass(frozen=True, slots=True)
class Pool:
    """Engines of one kind.

    Args:
        executors: of each replica: compiled, with weights and an empty cache.
        scheduling: of each engine.
        blocks: of each cache.
    """

    executors: tuple[JaxExecutor, ...]
    scheduling: Scheduling
    blocks: int


@dataclass(frozen=True, slots=True)
class Launched:
    """Engines' parts.

    Args:
        executors, scheduling, blocks: of the engines, those that decode where others prefill; as in `Pool`.
        longest: tokens of a request.
        hardware, software: of the devices, in words.
        dtype: of weights, activations and cache.
        narrow: of the layers' projections; None: as `dtype`.
        prefill: engines that only prefill; None: all do both.
    """

    executors: tuple[JaxExecutor, ...]
    scheduling: Scheduling
    blocks: int
    longest: int
    hardware: str
    software: str
    dtype: DType
    narrow: DType | None = None
    prefill: Pool | None = None

    @property
    def precision(self) -> str:
        """Formats by role, as plans of serving take them."""
        wide = self.dtype.value
        return f"weights={(self.narrow or self.dtype).value},activations={wide},kv={wide},compute={wide},head={wide}"

    @property
    def executor(self) -> JaxExecutor:
        """Of the first replica; the others are alike."""
        return self.executors[0]


def compile_cache(folder: Path | None) -> None:
    """Keep compiled programs in a folder, so that the next start is quick; None: in JAX's, or in the user's cache."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    own = jax.config.values["jax_compilation_cache_dir"] or home / "meshwise" / "programs"
    jax.config.update("jax_compilation_cache_dir", str(folder or own))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def launch(
    model: Model,
    asked: Asked,
    *,
    weights: Path | None,
    seed: int,
    dtype: DType | None,
    cpu_devices: int | None,
    progress: Callable[[str], None],
    say: Callable[[str], None],
    narrow: DType | None = None,
    prefill: Asked | None = None,
    ahead: bool | None = None,
) -> Launched:
    """Bring up engines' parts.

    Args:
        model: to be served.
        asked: the engines.
        weights: published files; None: drawn by `seed`.
        seed: see `weights`.
        dtype: of weights, activations and cache; None: fp32 on a CPU, which has no quick bf16, else bf16.
        cpu_devices: fake devices of the CPU.
        progress: told a line now and then.
        say: told what is to be known of the devices.
        narrow: format of the layers' projections; None: as `dtype`.
        prefill: engines that only prefill, before `asked`, which then only decode.
        ahead: whether a step may be started before the tokens of the last are fetched, not of those that only prefill;
            None: on GPUs, which else wait for the host.

    Raises:
        MeshwiseError: a model, a layout or weights that cannot be served; other devices than needed.
        InfeasibleError: memory does not suffice.
    """
    kinds = [asked] if prefill is None else [asked, prefill]
    groups = _devices(kinds, cpu_devices, say)
    first = groups[0][0][0]
    on_cpu = first.platform == "cpu"
    chosen = dtype or (DType.FP32 if on_cpu else DType.BF16)
    if narrow is not None and on_cpu:
        say(f"--quantization {narrow.value}: a CPU widens such weights in each step: less memory, more time")
    published = None if weights is None else find_weights(weights, model)
    ahead = first.platform == "gpu" if ahead is None else ahead
    longest = _longest(model, asked.limits.max_len)

    def weights_of(made: PagedModel) -> Any:
        return made.initial_weights(seed) if published is None else made.load(published)

    with in_words():
        form = partial(paged_model, model, page_tokens=PAGE_TOKENS, dtype=chosen, narrow=narrow)
        pools = [
            _pool(
                kind,
                own,
                form,
                weights_of,
                longest,
                progress=progress,
                sends=prefill is not None,
                ahead=ahead and kind is asked,
            )
            for kind, own in zip(kinds, groups, strict=True)
        ]
    for refused in sorted({words for pool in pools for words in pool.executors[0].model.refusals}):
        say(f"attention is plain JAX, not the kernel of TPUs: {refused}")
    if prefill is not None:
        for executor in pools[0].executors:
            executor.prepare(pools[1].executors)
    (made, *others), hardware = pools, f"{sum(len(g) for own in groups for g in own):,} x {first.device_kind}"
    parts = made.executors, made.scheduling, made.blocks
    return Launched(*parts, longest, hardware, software_of(first), chosen, narrow, *others)


def _pool(
    kind: Asked,
    groups: list[list[Any]],
    form: Callable[..., PagedModel],
    weights_of: Callable[[PagedModel], Any],
    longest: int,
    *,
    progress: Callable[[str], None],
    sends: bool,
    ahead: bool,
) -> Pool:
    """Compile engines of one kind, and give them their weights.

    Args:
        kind: that is asked for.
        groups: devices of each.
        form: makes a model of a layout and devices.
        weights_of: reads its weights.
        longest: tokens of a request.
        progress: told a line now and then.
        sends, ahead: as in `JaxExecutor`.
    """
    limits, on_cpu, executors = kind.limits, groups[0][0].platform == "cpu", []
    scheduling = Scheduling(
        limits.policy,
        limits.max_batch or (8 if on_cpu else 64),
        limits.max_step_tokens or (512 if on_cpu else 2048),
        prefix_cache=limits.prefix_cache,
        ranks=kind.layout.expert,
    )
    cache = None if limits.cache_bytes is None else limits.cache_bytes / kind.replicas
    blocks = _blocks(form(kind.layout, groups[0], pages=scheduling.ranks), scheduling, longest, cache, groups[0])
    for number, devices in enumerate(groups, 1):
        which = "" if kind.replicas == 1 else f"replica {number} of {kind.replicas}: "
        progress(f"{which}reading weights")
        made = LayeredModel.where_faster(form(kind.layout, devices, pages=blocks))
        values, told = weights_of(made), partial(_tell, progress, which)
        flags: Any = {"constrained": is_installed(), "sends": sends, "ahead": ahead}
        executors.append(JaxExecutor(made, values, scheduling, longest, told, **flags))
    return Pool(tuple(executors), scheduling, blocks)


def _tell(progress: Callable[[str], None], which: str, words: str) -> None:
    progress(which + words)


def _devices(kinds: list[Asked], cpu_devices: int | None, say: Callable[[str], None]) -> list[list[list[Any]]]:
    """Of each kind and replica, as many devices as its layout has chips.

    Raises:
        ClusterError: there are fewer.
    """
    found, needed = find_devices(cpu_devices, say), sum(k.replicas * k.layout.engine_chips for k in kinds)
    if len(found) < needed:
        first, each = kinds[0], kinds[0].layout.engine_chips
        what = " and ".join(_in_words(kind) for kind in kinds)
        alone = len(kinds) == 1 and len(found) >= each and first.replicas > 1
        fewer = f"--replicas {len(found) // each:,} runs on these, " if alone else ""
        raise ClusterError(
            f"the engine runs on {needed:,} devices ({what}), found {len(found):,} x {found[0].device_kind}; "
            f"{fewer}--cpu-devices {needed} makes as many fake ones of the CPU"
        )
    if jax.process_count() > 1 and needed != len(found):
        raise ClusterError(
            f"the processes have {len(found):,} devices, and {_in_words(kinds[0])} runs on {needed:,}; give --tensor, "
            f"--cache and --expert, or a plan, so that their product is {len(found):,}"
        )
    left = iter(found)
    return [[[next(left) for _ in range(k.layout.engine_chips)] for _ in range(k.replicas)] for k in kinds]


def _in_words(kind: Asked) -> str:
    return f"layout {kind.layout}" if kind.replicas == 1 else f"{kind.replicas:,} replicas of layout {kind.layout}"


def _longest(model: Model, asked: int | None) -> int:
    """Tokens of a request.

    Raises:
        LayoutError: more than the model was made for.
    """
    most = model.max_seq_len
    if asked is not None and most is not None and asked > most:
        raise LayoutError(f"--max-len {asked:,}: {model.name} was made for {most:,} tokens; give at most as many")
    return asked or min(most or 2048, 2048)


def _blocks(model: PagedModel, scheduling: Scheduling, longest: int, asked: float | None, devices: list[Any]) -> int:
    """Blocks of the cache: a whole batch of the longest requests, or as many as memory holds; as many on each rank.

    Args:
        model: of one page on each rank.
        scheduling, longest: of the engine.
        asked: bytes on all devices; None: as fits.
        devices: of the engine.

    Raises:
        InfeasibleError: not even one request fits.
    """
    each, ranks = -(-longest // PAGE_TOKENS), scheduling.ranks
    wanted = scheduling.rank_batch * each
    fitting = None if asked is None else int(asked // (model.page_bytes * ranks))
    if asked is None:
        own = next(d for d in devices if d.process_index == jax.process_index())
        limit = (own.memory_stats() or {}).get("bytes_limit")
        if limit is not None:
            held, page = (
                sum(map(_bytes_of_one, jax.tree.leaves(t))) for t in (model.abstract_weights, model.abstract_pool)
            )
            fitting = least(int((_SHARE * limit - held) // page))
    blocks = wanted if fitting is None else fitting if asked is not None else min(wanted, fitting)
    if blocks < each:
        raise InfeasibleError(
            f"the cache: one request of {longest:,} tokens takes {format_bytes(each * model.page_bytes)}, there is "
            f"space for {format_bytes(max(blocks, 0) * model.page_bytes)}; give a smaller --max-len, or more memory"
        )
    return blocks * ranks


def _bytes_of_one(array: Any) -> int:
    """Bytes that one device holds of an array."""
    size = array.dtype.itemsize
    for n in array.sharding.shard_shape(array.shape):
        size *= n
    return int(size)
