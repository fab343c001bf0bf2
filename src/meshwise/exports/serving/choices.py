"""The choices of a plan of serving that have an effect, and the arithmetic of engines, ranks and requests.

Not here: any engine's own names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from meshwise.core.dtypes import DType
from meshwise.costs.problem import ServingProblem, readable_context
from meshwise.costs.serving.answer import ServingEstimate, ServingSetup
from meshwise.exports.choices import field_values, given_values
from meshwise.exports.exported import Refusals, Rule
from meshwise.hardware import Chip
from meshwise.jobs import ServingLoad
from meshwise.jobs.lengths import parse_lengths
from meshwise.models import Model
from meshwise.models.spec import LatentAttention
from meshwise.sharding.serving import ServingLayout

#: Fields that every engine answers for, by an option, a note or a refusal.
_ANSWERED = {
    "layout": "tensor cache width context expert fsdp stage replicas cache_split sequence_parallel "
    "expert_tensor_parallel context_method wires",
    "setup": "mode prefill decode batch prefill_batch chunk",
    "load": "prompt output mix cached_prefix context precision block_tokens reserve draft_tokens acceptance "
    "expert_imbalance",
}

_KNOWN = {part: frozenset(names.split()) for part, names in _ANSWERED.items()}

#: How many times as many requests a measurement sends as are on their way at once.
_ROUNDS = 8


class _OfProblem:
    """What engines want to know of the model and the load."""

    problem: ServingProblem

    @property
    def load(self) -> ServingLoad:
        """Lengths, formats."""
        return self.problem.load

    @property
    def model(self) -> Model:
        """What is served."""
        return self.problem.model

    @property
    def chip(self) -> Chip:
        """What it runs on."""
        return self.problem.cluster.chip

    @property
    def mixture(self) -> bool:
        """Whether the model has experts."""
        return bool(self.model.mixtures)

    @property
    def latent(self) -> bool:
        """Whether all attention keeps latents instead of keys and values of heads."""
        return all(isinstance(g.layer.attention, LatentAttention) for g in self.model.spec.groups)

    @property
    def kv_heads(self) -> int:
        """Key/value heads of the layers that have most; 1 for latents."""
        return self.model.kv_heads

    @property
    def heads(self) -> tuple[int, ...]:
        """Query heads of the layers, each number once."""
        return self.model.heads

    @property
    def experts(self) -> int:
        """Experts of a mixture, 0 without."""
        return max((m.experts for m in self.model.mixtures), default=0)

    @property
    def predicts_tokens(self) -> bool:
        """Whether the model has modules that predict further tokens."""
        return self.model.spec.mtp is not None

    @property
    def formats(self) -> tuple[DType, DType]:
        """Of weights and of operands of products with them."""
        return self.load.formats.weights, self.load.formats.compute

    @property
    def wide(self) -> bool:
        """Whether weights and operands are as activations are: nothing is quantised."""
        return self.load.formats.wide

    @property
    def published(self) -> str:
        """The method by which the published checkpoint has just these formats, "" where it has others."""
        found = self.model.quantization
        return found.method if found is not None and self.problem.as_published else ""


@dataclass(frozen=True)
class Engine(_OfProblem):
    """An engine as rules read it.

    Args:
        problem: model, load, cluster.
        name: "serve" for engines that do both, else "prefill" or "decode".
        layout: of one engine, and how many there are.
        prefill_batch: prompts that are prefilled together.
        chunk: tokens of a prompt in one step; None for all.
    """

    problem: ServingProblem
    name: str
    layout: ServingLayout
    prefill_batch: int = 1
    chunk: int | None = None

    @property
    def apart(self) -> bool:
        """Whether engines prefill or decode."""
        return self.name != "serve"

    @property
    def ranks(self) -> int:
        """Groups of chips whose attention sees different requests (data-parallel attention)."""
        return self.layout.expert

    @property
    def splits_experts(self) -> bool:
        """Whether ranks hold different experts."""
        return self.layout.expert > 1 or not self.layout.expert_tensor_parallel

    @property
    def weight_chips(self) -> int:
        """Chips of one rank and one stage: the ways of what other engines call tensor parallelism."""
        return self.layout.tensor * self.layout.cache


@dataclass(frozen=True, kw_only=True)
class Pool(Engine):
    """Engines of one kind in a plan.

    Args:
        requests: that one engine works on at once, those being prefilled included.
        prefill_tokens: of prompts in one step of an engine's rank; 0 where it does not prefill.
        positions: that a decode step computes on an engine's rank; 0 where it does not decode.
        memory: bytes by class on the fullest chip.
    """

    requests: int
    prefill_tokens: int
    positions: int
    memory: dict[str, float]

    @property
    def words(self) -> str:
        """What one of these engines does."""
        does = {"serve": "", "prefill": " that prefills", "decode": " that decodes"}
        return f"one engine{does[self.name]}"

    @property
    def requests_per_rank(self) -> int:
        """Requests of one of these groups."""
        return math.ceil(self.requests / self.ranks)

    @property
    def step_tokens(self) -> int:
        """Positions that one step of a rank computes at most, where it does both in one."""
        return self.prefill_tokens + self.positions


@dataclass(frozen=True)
class ServingChoices(_OfProblem):
    """A plan of serving, read by what its choices mean.

    Args:
        problem: model, load, cluster.
        estimate: what the plan would do.
    """

    problem: ServingProblem
    estimate: ServingEstimate

    @property
    def setup(self) -> ServingSetup:
        """Layouts and batches."""
        return self.estimate.setup

    @property
    def apart(self) -> bool:
        """Whether engines prefill or decode."""
        return self.setup.mode == "disaggregated"

    @property
    def longest(self) -> int:
        """Tokens of a request when it ends, and those that are proposed in vain, as far as the model reads."""
        tokens = int(self.load.longest) + self.load.draft_tokens
        return int(min(tokens, readable_context(self.model, self.load) or tokens))

    @property
    def new_tokens(self) -> int:
        """Tokens of a prompt that are computed; the mean, where they differ."""
        return math.ceil(self.load.computed)

    @property
    def output_tokens(self) -> int:
        """Tokens that a request gets; the mean, where they differ."""
        return math.ceil(self.load.output)

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt, or more."""
        mix = self.load.mix
        if mix is None:
            return int(self.load.prompt)
        drawn = parse_lengths(mix.prompt).most if mix.prompt is not None else None
        return mix.longest if drawn is None else drawn

    @property
    def being_prefilled(self) -> int:
        """Requests before their first token, of all engines: as many as come in such a time (Little's law)."""
        return math.ceil(self.estimate.requests_per_s * self.estimate.ttft.expected)

    @property
    def measured_engines(self) -> int:
        """Engines whose requests one measurement sends: all where they are apart, else one, as all are alike."""
        return 1 if self.apart else self.setup.decode.replicas

    @property
    def on_their_way(self) -> int:
        """Requests at once in a measurement: as many as keep the batch full, and those before their first token."""
        if self.apart:
            return self.setup.batch * self.setup.decode.replicas + self.being_prefilled
        return self.setup.batch + math.ceil(self.being_prefilled / self.setup.decode.replicas)

    @property
    def num_prompts(self) -> int:
        """Requests of a measurement: so many that beginning and end weigh little."""
        return _ROUNDS * self.on_their_way

    @cached_property
    def pools(self) -> tuple[Pool, ...]:
        """The kinds of engines."""
        setup, estimate = self.setup, self.estimate
        positions = math.ceil(setup.batch / setup.decode.expert) * int(self.load.positions_per_step)

        def pool(name: str, layout: ServingLayout, **numbers: Any) -> Pool:
            return Pool(self.problem, name, layout, setup.prefill_batch, setup.chunk, **numbers)

        of_decode = {"positions": positions, "memory": dict(estimate.decode.memory)}
        if not self.apart:
            tokens = self._prefill_tokens(setup.decode)
            return (pool("serve", setup.decode, requests=self.on_their_way, prefill_tokens=tokens, **of_decode),)
        of_prefill = {"prefill_tokens": self._prefill_tokens(setup.prefill), "memory": dict(estimate.prefill.memory)}
        return (
            pool("prefill", setup.prefill, requests=setup.prefill_batch, positions=0, **of_prefill),
            pool("decode", setup.decode, requests=setup.batch, prefill_tokens=0, **of_decode),
        )

    def _prefill_tokens(self, layout: ServingLayout) -> int:
        chunk = self.new_tokens if self.setup.chunk is None else min(self.setup.chunk, self.new_tokens)
        return math.ceil(self.setup.prefill_batch / layout.expert) * chunk

    def nodes(self, layout: ServingLayout) -> int:
        """Hosts that one engine lies on."""
        return math.ceil(layout.engine_chips / self.problem.cluster.chip.chips_per_host)

    def check_known(self, refusals: Refusals) -> None:
        """Refuse what no engine knows of: a choice that is newer than this code, and two layouts in one engine."""
        for layout in {self.setup.prefill, self.setup.decode}:
            refusals.add_unanswered(field_values(layout, ServingLayout()), _ANSWERED["layout"].split())
        for name in {f.name for f in fields(self.setup)} - set(_ANSWERED["setup"].split()):
            refusals.add(name, "it is not handed over yet", f"a plan without {name}")
        refusals.add_unanswered(given_values(self.load), _ANSWERED["load"].split())
        if not self.apart and not self.setup.one_layout:
            refusals.add(
                f"prefill by {self.setup.prefill}, generation by {self.setup.decode}",
                "its engines have one layout for both",
                f"estimate serve --layout {self.setup.decode}, or --mode disaggregated",
            )

    def check_fits(self, refusals: Refusals) -> None:
        """Refuse what does not fit in memory."""
        if not self.estimate.fits:
            most = self.estimate.largest_batch or 0
            refusals.add(
                f"batch={self.setup.batch}", "it does not fit in memory", f"--batch {most}" if most else "more chips"
            )


def unknown_serving_load(load: ServingLoad) -> bool:
    """Whether a load makes a choice that no engine answers for."""
    return any(value != default and name not in _KNOWN["load"] for name, value, default in given_values(load))


def unknown_serving_layout(layout: ServingLayout) -> bool:
    """Whether a layout makes a choice that no engine answers for."""
    return any(getattr(layout, name) != default for name, default in _UNKNOWN_FIELDS)


_UNKNOWN_FIELDS = tuple((f.name, f.default) for f in fields(ServingLayout) if f.name not in _KNOWN["layout"])


#: What an engine cannot express, read for each kind of engines of a plan.
EngineRules = tuple[Rule[Engine], ...]


def vendors(names: Sequence[str], elsewhere: str) -> Rule[Engine]:
    """Chips of other vendors: an engine's options are not written for them here."""
    return Rule(
        lambda c: c.chip.vendor not in names,
        "chip {c.chip.title}",
        f"its options are written here for {' and '.join(names)}",
        elsewhere,
    )


def whole_heads(*, copies: bool) -> Rule[Engine]:
    """Ways that heads do not divide over, which the plan pads; `copies`: fewer key/value heads are copied."""

    def whole(c: Engine, ways: int) -> bool:
        keys, all_ways = c.kv_heads, ways * c.layout.cache
        queries = not any(heads % all_ways for heads in c.heads)
        return queries and (c.latent or keys % ways == 0 or (copies and ways % keys == 0))

    def why(c: Engine) -> str:
        said = "" if c.latent else f", {c.kv_heads} of keys and values,"
        return f"{' or '.join(map(str, c.heads))} heads{said} do not divide over it"

    def nearest(c: Engine) -> str:
        fitting = next((n for n in range(c.layout.tensor - 1, 0, -1) if whole(c, n)), None)
        return f"tensor={fitting}" if fitting else "no cache axis"

    return Rule(
        lambda c: not whole(c, c.layout.tensor),
        lambda c: f"tensor={c.layout.tensor}" + (f",cache={c.layout.cache}" if c.layout.cache > 1 else ""),
        why,
        nearest,
    )


def whole_experts(ways: Callable[[Engine], int]) -> Rule[Engine]:
    """`ways` that experts do not divide over."""

    def nearest(c: Engine) -> str:
        return f"expert={max(n for n in range(1, ways(c)) if c.experts % n == 0)}"

    return Rule(
        lambda c: c.experts % ways(c) > 0,
        lambda c: f"experts over {ways(c)} ranks",
        "{c.experts} experts do not divide over them",
        nearest,
    )


#: (weights, operands) -> the engine's name of the method, the methods of published checkpoints that have these formats
#: already, and the checkpoint that it needs ("" where any will do).
Methods = Mapping[tuple[DType, DType], tuple[str, tuple[str, ...], str]]


def formats_of(
    methods: Mapping[tuple[DType, DType], Any],
    caches: Collection[DType],
    *,
    none: str,
    kv: str,
    loads: Collection[str] = (),
) -> EngineRules:
    """Formats that an engine has no method for (`none` says so), or none for caches, of which `kv` is the nearest.

    `loads`: methods of published checkpoints that it reads, whatever of a layer they leave wide.
    """
    known = ", ".join(f"weights={w.value},compute={c.value}" for w, c in methods)
    return (
        Rule(
            lambda c: not (c.wide or c.published in loads or (c.load.formats.uniform and c.formats in methods)),
            "weights={c.formats[0].value},compute={c.formats[1].value}",
            none,
            f"one of {known}",
        ),
        Rule(
            lambda c: c.load.formats.kv not in (c.load.formats.activations, *caches),
            "kv={c.load.formats.kv.value}",
            "its caches have no such format",
            kv,
        ),
    )


#: Of all engines on GPUs.
ON_GPUS: EngineRules = (
    whole_heads(copies=True),
    Rule(
        lambda c: c.layout.width > 1,
        "width={c.layout.width}", "its weights are split one way, by heads and feed-forward widths",
        lambda c: f"tensor={c.layout.tensor * c.layout.width}, or plan serve --forbid width",
    ),
    Rule(
        lambda c: c.layout.fsdp > 1,
        "fsdp={c.layout.fsdp}", "it never gathers weights",
        lambda c: f"tensor={c.layout.tensor * c.layout.fsdp}, or plan serve --forbid fsdp",
    ),
    Rule(
        lambda c: c.layout.cache > 1 and c.layout.cache_split == "batch",
        "cache_split=batch", "ranks that share out requests hold attention's weights whole",
        lambda c: (f"expert={c.layout.cache}" if c.mixture else "cache_split=sequence")
        + f", or tensor={c.weight_chips}",
    ),
    Rule(
        lambda c: c.load.formats.head != c.load.formats.activations,
        "head={c.load.formats.head.value}", "embedding and head stay in the format of activations",
        "head={c.load.formats.activations.value}",
    ),
)  # fmt: skip
