"""What a measured serving row did, in our words: its model, load, cluster, calibration, layouts and batches.

Not here: reading rows (`reading`), and what is compared (`serving`).
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace

from meshwise.core.errors import MeshwiseError
from meshwise.costs.calibration import Calibration
from meshwise.costs.engines import find_serving_calibration, serving_calibration
from meshwise.costs.problem import ServingProblem
from meshwise.costs.serving.answer import ServingSetup
from meshwise.hardware import Chip
from meshwise.jobs import ServingLoad
from meshwise.scoring.rows import ServingRun, Sharing, first_match, parse_mode
from meshwise.scoring.scenario import Scenario, cluster_of, model_of
from meshwise.sharding.serving import ServingLayout


@dataclass(frozen=True, kw_only=True)
class ServingScenario(Scenario):
    """A serving row as it can be estimated.

    Args:
        candidates: layouts and batches; several where the row leaves open how its chips are used.
        uncertainty_sources: what it does not say: causes of `spread.SPREADS`.
    """

    run: ServingRun
    problem: ServingProblem
    candidates: tuple[ServingSetup, ...]
    uncertainty_sources: tuple[str, ...] = ()


def build_serving_scenario(run: ServingRun, calibration: str) -> ServingScenario:
    """What a row did.

    Raises:
        MeshwiseError: something that it says is unknown here, or contradicts itself.
    """
    if run.output_len in (None, 0) and run.steps != "prefill":
        raise MeshwiseError("output_len is blank or 0: how long a request is decides what its steps read; fill it in")
    _check_drafts(run)
    model, of_model = model_of(run)
    cluster, of_cluster = cluster_of(run)
    precision, of_precision = _precision(run)
    if run.ep not in (None, 1) and not model.mixtures:
        raise MeshwiseError(f"ep {run.ep} of a model without experts; expected 1 or a blank cell")
    if ";" in run.weights_dtype and not model.mixtures:
        raise MeshwiseError(f"weights_dtype {run.weights_dtype!r}: the model has no experts; expected one format")
    layouts, of_layout = _layouts(run)
    _check_dies(run, cluster.chip)
    prompt, output, of_lengths = _lengths(run)
    load = ServingLoad(prompt=prompt, output=output, precision=precision, reserve=0.0)
    model.serving_program("decode")  # refuses what cannot be served
    problem = ServingProblem(model, load, cluster, _calibration(run, calibration, cluster.chip))
    batch = _batch(run, layouts[0])
    together = batch if run.is_static else _prompts_together(run, batch, load, layouts[0].expert)
    chunk = None if run.is_static else _STEP_TOKENS  # a prompt goes along with what is generated, as engines do
    of_engine = []
    if calibration == "fitted" and _engine(run) is None:
        taken = {"vllm": "vLLM", "jax": "JAX"}[problem.calibration.name.removeprefix("fitted+")]
        of_engine.append(f"engine is not named or not known: {taken} taken")
    of_unit = ("tokens/s of each chip, as in the rest of that table",) if is_each_chips(run) else ()
    return ServingScenario(
        run=run,
        problem=problem,
        candidates=tuple(ServingSetup("aggregated", x, x, batch, together, chunk) for x in layouts),
        assumed=(*of_model, *of_cluster, *of_precision, *of_engine, *of_layout, *of_lengths, *of_unit),
        uncertainty_sources=("unnamed",) if of_engine else (),
    )


#: A row's words of its engine -> a name of `ENGINES`; the first that is found.
_ENGINES = (
    (r"faster\s*transformer", "fastertransformer"), (r"tensorrt-llm v0\.|trt-?llm v?0\.", "trtllm-2023"),
    (r"tensorrt-llm|trt-?llm", "trtllm"), (r"sglang", "sglang"), (r"vllm", "vllm"), (r"gpt-fast", "gpt-fast"),
    (r"\bjax\b|jetstream|esti", "jax"),
)  # fmt: skip


def _calibration(run: ServingRun, name: str, chip: Chip) -> Calibration:
    """The calibration; "fitted" takes the engine that the row names, where its constants are known."""
    engine = _engine(run) if name == "fitted" else None
    found = serving_calibration(chip, engine) if engine else find_serving_calibration(name, chip)
    return replace(found, grouped_heads=()) if engine and re.search(_WITHOUT_XQA, _said(run)) else found


def _engine(run: ServingRun) -> str | None:
    """Name in `ENGINES` of what served a row; None where it is not known."""
    return first_match(_ENGINES, _said(run))


def _said(run: ServingRun) -> str:
    return f"{run.engine} {run.software}".lower()


#: Releases of TensorRT-LLM before its kernels for groups of query heads (XQA).
_WITHOUT_XQA = r"tensorrt-llm v0\.[56]|trt-?llm v?0\.[56]"


def is_each_chips(run: ServingRun) -> bool:
    """Whether tokens a second are each chip's, although the row says all chips'.

    The table of A100 in the documentation of TensorRT-LLM 0.6 has "out tok/s" over it, that of H100 "out tok/s/GPU".
    Both are of each: Llama-70B on four makes 670 there with prompts and outputs of 128, and 79 with prompts of 2,048;
    release 0.9 has 686 and 80 a GPU, and 0.5 already made 1,237 with fewer requests.
    """
    said_all = run.measured_metric == "output_tokens_per_s" and run.chip.startswith("a100")
    return said_all and bool(re.search(_EACH_CHIPS, _said(run)))


#: The release whose table that is.
_EACH_CHIPS = r"tensorrt-llm v0\.6"


#: Words for tokens that are drafted and then checked, several in one step; and what denies them, before or after.
_DRAFTS = (
    r"\bmtp\b|multi-?token prediction|\beagle\b|eagle-?\d|\bmedusa\b|speculati(?:ve|on)"
    r"|draft (?:tokens?|models?)"
)
_DENIED = (
    rf"\b(?:no|not|without|non|w/o)\b[ -]*(?:{_DRAFTS})"
    rf"|(?:{_DRAFTS})[^,;.]{{0,12}}?\b(?:off|disabled|none|0)\b"
)


def _check_drafts(run: ServingRun) -> None:
    """Refuse rows whose tokens were drafted: how many a step gives is not said."""
    words = re.sub(_DENIED, "", f"{run.engine} {run.software} {run.serving_mode} {run.notes}".lower())
    if found := re.search(_DRAFTS, words):
        raise MeshwiseError(
            f"tokens were drafted and checked ({found[0]}), several a step: how many were accepted decides the time, "
            "which no column says; `meshwise simulate serve --speculate` takes it, and rows without are predicted"
        )


def _check_dies(run: ServingRun, chip: Chip) -> None:
    """Refuse a run on one die of a package: layouts are of whole chips."""
    if chip.vendor == "amd" and chip.devices_per_chip > 1 and (run.tp or 1) * (run.pp or 1) == run.n_chips:
        raise MeshwiseError(
            f"tp {run.tp or 1} on {run.n_chips} {chip.title}: each of its {chip.devices_per_chip} dies is a device, "
            "with half of memory and bandwidth, and layouts here are of whole packages"
        )


#: Mean of lengths that are drawn between 0.8 and 1.0 of the nominal ones, as InferenceMAX does.
_DRAWN = 0.9

#: Tokens of prompts and outputs in its loads.
_INFERENCEMAX = {1024, 8192}

#: Tokens of prompts that engines prefill in one step at most (the usual `max_num_batched_tokens`).
_STEP_TOKENS = 8192


def _lengths(run: ServingRun) -> tuple[int, int, tuple[str, ...]]:
    """Mean tokens of prompts and outputs, and what was assumed of them."""
    prompt, output = run.prompt_len, max(run.output_len or 1, 1)
    if not _is_inferencemax(run):
        return prompt, output, ()
    note = f"lengths are drawn between 0.8 and 1.0 of nominal: {_DRAWN:g} of them taken"
    return round(_DRAWN * prompt), max(round(_DRAWN * output), 1), (note,)


#: Of InferenceMAX's requests: how many more of ten waves, which start all at once, end in the steps in which any end
#: (lengths are drawn from a fifth), and steps that its TensorRT-LLM keeps prompts until all ranks have one
#: (attention_dp_config.timeout_iters).
_BUNCHED, _KEPT = 2.5, 60


def _prompts_together(run: ServingRun, batch: int, load: ServingLoad, ranks: int) -> int:
    """Prompts that come while one step decodes, which engines prefill together as far as a step's tokens allow.

    Of `ranks` that attend for sequences of their own, all wait for the one that has a prompt.
    """
    coming = batch / max(load.output - 1, 1)
    if _is_inferencemax(run):
        kept = min(coming * _KEPT, ranks) if ranks > 1 and _engine(run) == "trtllm" else 0.0
        coming = max(coming * _BUNCHED, kept)
    return int(max(min(coming, ranks * max(_STEP_TOKENS // load.prompt, 1), batch), 1))


def _batch(run: ServingRun, layout: ServingLayout) -> int:
    """Requests of one engine at once; `batch` of a row that says so is of each rank that attends for its own."""
    batch, said, replicas = run.batch, run.concurrency, layout.replicas
    if batch is not None and "per DP rank" in run.notes and (said is None or said >= batch * layout.expert * replicas):
        batch *= layout.expert
    if batch is None:
        if said is None:
            raise MeshwiseError("batch and concurrency are blank: fill one in")
        if said % replicas:
            raise MeshwiseError(f"concurrency {said} is no multiple of the {replicas} engines; fill in batch")
        return said // replicas
    requests = batch * replicas
    if said is not None and (said < requests or (run.is_static and said != requests)):
        raise MeshwiseError(
            f"batch {batch} of {replicas} engines is {requests} requests at once, but concurrency is {said}; leave one "
            "of the two blank"
        )
    return batch


#: A source's words -> a format; the first that is found.
_FORMATS = (
    (r"nvfp4|mxfp4|^fp4", "fp4"), (r"fp8|e4m3", "fp8"), (r"^int4|awq|gptq|w4a\d|a16w4|^4[- ]?bit|^q4", "int4"),
    (r"^int8|w8a|^8[- ]?bit|^q8", "int8"), (r"^bf(?:loat)?16|^auto$", "bf16"), (r"^fp16|^float16|^half", "fp16"),
    (r"^fp32|^tf32|^float32", "fp32"),
)  # fmt: skip


def _format(column: str, text: str) -> str:
    """The format that a cell names."""
    found = first_match(_FORMATS, text.strip().lower())
    if found is None:
        expected = "bf16, fp16, fp8, int8, int4 or nvfp4"
        raise MeshwiseError(f"{column} {text!r} is not understood; expected {expected}")
    return found


def _precision(run: ServingRun) -> tuple[str, tuple[str, ...]]:
    """Formats by role, and what was assumed of them.

    Weights of 8 bits in floating point and of fp4 have such operands unless the row says otherwise; int8 and int4 are
    formats of storage alone unless it says int8 operands.
    """
    notes = []
    whole, _, apart = (part.strip().lower() for part in run.weights_dtype.partition(";"))
    if apart and not apart.startswith("experts"):
        raise MeshwiseError(
            f"weights_dtype {run.weights_dtype!r}: after a semicolon stands the format of experts, as in 'fp8; experts "
            f"nvfp4', found {apart!r}"
        )
    weights = _format("weights_dtype", whole) if whole else "bf16"
    experts = _format("weights_dtype", apart.removeprefix("experts").strip()) if apart else weights
    if not run.weights_dtype:
        notes.append("weights_dtype is blank: bf16, as the model is published, taken")
    given = _format("act_dtype", run.act_dtype) if run.act_dtype else ""
    wide = given if given in ("fp16", "fp32") else weights if weights in ("fp16", "fp32") else "bf16"
    narrow = (f for f in (experts, weights) if f in ("fp8", "fp4") and "mxfp4" not in run.weights_dtype.lower())
    compute = given or next(narrow, wide)  # most FLOPs of a mixture are its experts'
    cache = _format("kv_dtype", run.kv_dtype) if run.kv_dtype else "fp8" if _narrow_cache(run, weights) else wide
    if run.weights_dtype and not run.kv_dtype:
        notes.append(f"kv_dtype is blank: {cache} taken with {weights} weights")
    if "group" in run.weights_dtype and "128" not in run.weights_dtype:
        notes.append(f"weights {run.weights_dtype!r}: scales counted by groups of 128")
    stored = f"weights={weights}" + (f",experts={experts}" if experts != weights else "")
    return f"{stored},activations={wide},compute={compute},kv={cache}", tuple(notes)


def _narrow_cache(run: ServingRun, weights: str) -> bool:
    """Whether a cache of fp8 goes with the weights.

    Checkpoints of ModelOpt, fp4 or fp8 with one scale a tensor, have scales for it, which TensorRT-LLM takes and others
    are told to take by InferenceMAX; those of fp8 with scales by blocks (DeepSeek's way) have none.
    """
    if weights != "fp8" or "block" in run.weights_dtype:
        return weights == "fp4"
    return _engine(run) in ("trtllm", "trtllm-2023") or _is_inferencemax(run)


def _is_inferencemax(run: ServingRun) -> bool:
    """Whether a row is of one of InferenceMAX's loads."""
    return "InferenceMAX draws" in run.notes and {run.prompt_len, run.output_len} <= _INFERENCEMAX


def _layouts(run: ServingRun) -> tuple[tuple[ServingLayout, ...], tuple[str, ...]]:
    """The layouts that a row can mean, and what was assumed of them."""
    tp, pp, ep = run.tp or 1, run.pp or 1, run.ep or 1
    if run.dp == tp == ep and run.n_chips == tp * pp and tp > 1:  # SGLang's --tp 8 --dp 8 --ep 8 of the same eight
        return (ServingLayout(expert=ep, stage=pp),), ("tp, dp and ep are of the same chips: attention by sequences",)
    engines, rest = divmod(run.n_chips, tp * pp)
    if rest or (run.dp is not None and run.dp != engines):
        raise MeshwiseError(
            f"tp {tp} x pp {pp}" + (f" x dp {run.dp}" if run.dp else "") + f" is not n_chips {run.n_chips}"
        )
    _, sharing = parse_mode(run.serving_mode)
    if sharing is not None and (tp == 1 or ep > 1):
        raise MeshwiseError(
            f"serving_mode {run.serving_mode!r} shares weights over the chips of tp, without ep: expected tp above 1 "
            f"and ep 1, found tp {tp} and ep {ep}"
        )
    if sharing is not None or (run.chip.startswith("v") and tp > 1 and ep == 1):
        return _two_ways(tp, pp, engines, sharing)
    if ep in (1, tp):
        return (ServingLayout(tensor=tp, stage=pp, replicas=engines, expert_tensor_parallel=ep == 1),), ()
    if tp == 1 and ep == engines:
        return (ServingLayout(expert=ep, stage=pp),), ()
    raise MeshwiseError(
        f"ep {ep}: expected 1, tp {tp}, or with tp 1 the n_chips / pp = {engines} (attention by sequences)"
    )


def _two_ways(
    tp: int, pp: int, engines: int, sharing: Sharing | None
) -> tuple[tuple[ServingLayout, ...], tuple[str, ...]]:
    """How TPUs of one engine share weights: both ways (2D weight-stationary), or gathered; the fastest is taken."""
    ways = [w for w in range(1, tp + 1) if tp % w == 0]
    if sharing == "gathered":
        found = [ServingLayout(tensor=tp // w, fsdp=w, stage=pp, replicas=engines) for w in ways]
        return tuple(found), ("weights gathered over the share of the chips that is fastest and fits",)
    if sharing == "both ways":
        ways = [w for w in ways if 1 < w < tp] or ways
    found = [
        ServingLayout(width=width, stage=pp, replicas=engines).replace(**{own: tp // width, "cache_split": split})
        for width, (own, split) in itertools.product(ways, (("tensor", "heads"), ("cache", "batch")))
    ]
    note = "weights split over heads and width, and the cache, in the way that is fastest and fits"
    return tuple(found), (note,)
