# Written by `python docs/generate.py` from the requests of the commands; a test fails when it is stale.

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from meshwise.book.problems import Solution
from meshwise.commands.catalogs import all_models as all_models
from meshwise.commands.catalogs import chip as chip
from meshwise.commands.catalogs import chips as chips
from meshwise.commands.catalogs import cluster as cluster
from meshwise.commands.catalogs import clusters as clusters
from meshwise.commands.catalogs import model as model
from meshwise.commands.export import export as export
from meshwise.commands.export import export_weights as export_weights
from meshwise.commands.hlo import explain as explain
from meshwise.commands.plan_serve import compare_serve as compare_serve
from meshwise.commands.plan_train import compare_train as compare_train
from meshwise.commands.simulate_serve import ServedLoad
from meshwise.commands.simulate_train import simulate_step as simulate_step
from meshwise.commands.verify import verify as verify
from meshwise.compiler.program import Program
from meshwise.core.errors import InfeasibleError as InfeasibleError
from meshwise.core.errors import MeshwiseError as MeshwiseError
from meshwise.costs.engine import EngineCosts
from meshwise.costs.product import Product
from meshwise.costs.serving.answer import ServingEstimate
from meshwise.exports.exported import Exported as Exported
from meshwise.profile.diagnosis import Diagnosis
from meshwise.report.bench import BenchResult
from meshwise.report.collective import CollectiveCase
from meshwise.report.load import LoadResult
from meshwise.report.roofline import RooflineCase
from meshwise.report.rule import RuleAnswer
from meshwise.report.run import GenerateResult, RunResult
from meshwise.report.sweep import Sweep as Sweep
from meshwise.scoring.fitting import Refined
from meshwise.scoring.score import Score as Score
from meshwise.scoring.score import ServingScore, TrainingScore
from meshwise.search.fits import Fits
from meshwise.search.plan import Plan as Plan
from meshwise.search.plan import ServingPlan
from meshwise.search.planner import PlanResult as PlanResult
from meshwise.search.serving.planner import ServingPlanResult
from meshwise.search.studies import Scaling

__version__: str

def answer_book(
    problem: str | None = None,
    *,
    changes: str | Mapping[str, float] | None = None,
    answer: str | None = None,
    hint: bool = False,
    constants: Literal["book", "catalog"] = "book",
    every: bool = False,
) -> tuple[Solution, ...]: ...
def bench(
    what: Literal["matmul", "attention", "memory", "collectives", "machine", "plan"],
    plan: str | os.PathLike[str] | None = None,
    *,
    on: str | None = None,
    cluster: str | os.PathLike[str] | None = None,
    dtype: Literal["bf16", "fp16", "fp32", "fp8", "int8"] | None = None,
    sizes: str | None = None,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    seconds: str | float = 0.5,
    cpu_devices: int | None = None,
    progress: Callable[[str], None] = ...,
    say: Callable[[str], None] = ...,
) -> BenchResult: ...
def calibrate(
    file: str | os.PathLike[str],
    *,
    calibration: str = "fitted",
    on: str | None = None,
    model: str | None = None,
    tensor: int | None = None,
    weights: str | None = None,
    save: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] = ...,
) -> Refined: ...
def collective(
    kind: Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "permute"],
    array: str,
    *,
    on: str | None = None,
    cluster: str | os.PathLike[str] | None = None,
    mesh: str | Mapping[str, int],
    over: str | None = None,
    sizes: str | Mapping[str, int] | None = None,
    wires: str | None = None,
    dtype: Literal["fp32", "tf32", "bf16", "fp16", "fp8", "int8", "int4", "fp4", "mxfp4"] = "bf16",
    choices: float | None = None,
    calibration: str = "none",
) -> CollectiveCase: ...
def estimate_serve(
    model: str,
    *,
    on: str | None = None,
    prompt: str | float | None = None,
    output: str | float | None = None,
    batch: int,
    layout: str,
    precision: str = "published",
    mode: Literal["aggregated", "disaggregated"] = "aggregated",
    prefill_layout: str | None = None,
    tool: str | Sequence[str] | None = None,
    cached_prefix: str | float = 0,
    context: str | float | None = None,
    block_tokens: int = 16,
    reserve: str | float = 0.1,
    draft_tokens: int = 0,
    acceptance: float = 0.7,
    expert_imbalance: float | None = None,
    cluster: str | os.PathLike[str] | None = None,
    price: str | float | None = None,
    csv: str | os.PathLike[str] | None = None,
    calibration: str = "fitted",
    prefill_batch: int = 1,
    chunk: str | float = "",
) -> ServingEstimate: ...
def estimate_train(
    model: str,
    *,
    on: str | None = None,
    layout: str,
    batch_tokens: str | float,
    seq_len: str | float,
    tokens: str | float | None = None,
    precision: str = "mixed",
    optimizer: str = "adamw",
    fine_tune: str = "full",
    tool: str | Sequence[str] | None = None,
    batch_slack: str | float = 0.1,
    expert_imbalance: float | None = None,
    capacity_factor: float | None = None,
    cluster: str | os.PathLike[str] | None = None,
    price: str | float | None = None,
    calibration: str = "fitted",
    anchor: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] = ...,
) -> PlanResult: ...
def explain_file(
    file: str | os.PathLike[str],
    *,
    on: str | None = None,
    cluster: str | os.PathLike[str] | None = None,
    mesh: str | Mapping[str, int] | None = None,
    wires: str | None = None,
    rows: int = 12,
) -> Program: ...
def fit(
    model: str,
    *,
    on: str | None = None,
    context: str | float | None = None,
    precision: str = "",
    cluster: str | os.PathLike[str] | None = None,
    price: str | float | None = None,
    progress: Callable[[str], None] = ...,
) -> Fits: ...
def generate(
    plan: Plan | PlanResult | str | os.PathLike[str],
    *,
    tokens: int,
    prompt: str | None = None,
    prompt_tokens: str | None = None,
    dtype: Literal["fp32", "bf16"] | None = None,
    weights: str | os.PathLike[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    cpu_devices: int | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = ...,
    say: Callable[[str], None] = ...,
) -> GenerateResult: ...
def load(
    url: str,
    *,
    rate: float | None = None,
    prompt: str | float = "128",
    output: str | float = "32",
    arrivals: str = "poisson",
    requests: str | int | None = None,
    csv: str | os.PathLike[str] | None = None,
    seed: int = 0,
    model: str | None = None,
    api_key: str | None = None,
    costs: str | None = None,
    prefix_tokens: int = 0,
    prefix_groups: int = 1,
    vocabulary: int | None = None,
    ignore_eos: bool = True,
    timeout: str | float = 600.0,
    chip: str = "",
    num_chips: int = 1,
    engine: str = "unknown",
    progress: Callable[[str], None] = ...,
) -> LoadResult: ...
def plan_serve(
    model: str,
    *,
    on: str | None = None,
    prompt: str | float | None = None,
    output: str | float | None = None,
    precision: str = "published",
    max_ttft: str | float | None = None,
    max_tpot: str | float | None = None,
    share: float = 0.99,
    rate: float | None = None,
    simulate: bool = True,
    objective: Literal["throughput", "tpot", "ttft"] = "throughput",
    max_batch: int = 4096,
    mode: Literal["aggregated", "disaggregated"] | None = None,
    chunk: str = "",
    forbid: str = "",
    tool: str | Sequence[str] | None = None,
    within: str | float = 0.02,
    top: int = 5,
    cached_prefix: str | float = 0,
    context: str | float | None = None,
    block_tokens: int = 16,
    reserve: str | float = 0.1,
    draft_tokens: int = 0,
    acceptance: float = 0.7,
    expert_imbalance: float | None = None,
    cluster: str | os.PathLike[str] | None = None,
    price: str | float | None = None,
    csv: str | os.PathLike[str] | None = None,
    calibration: str = "fitted",
    progress: Callable[[str], None] = ...,
    time_limit: float | None = None,
) -> ServingPlanResult: ...
def plan_train(
    model: str,
    *,
    on: str | None = None,
    batch_tokens: str | float,
    seq_len: str | float,
    tokens: str | float | None = None,
    precision: str = "mixed",
    optimizer: str = "adamw",
    fine_tune: str = "full",
    tool: str | Sequence[str] | None = None,
    objective: Literal["time", "cost", "chips"] = "time",
    deadline: str | float | None = None,
    budget: str | float | None = None,
    max_chips: int | None = None,
    max_memory: str | float | None = None,
    fix: str | Mapping[str, Any] | None = None,
    forbid: str | Sequence[str] | None = None,
    within: str | float = 0.02,
    top: int = 5,
    batch_slack: str | float = 0.1,
    expert_imbalance: float | None = None,
    capacity_factor: float | None = None,
    cluster: str | os.PathLike[str] | None = None,
    price: str | float | None = None,
    calibration: str = "fitted",
    anchor: str | os.PathLike[str] | None = None,
    front: bool = False,
    offload: bool = False,
    sensitivity: bool = False,
    progress: Callable[[str], None] = ...,
    time_limit: float | None = None,
) -> PlanResult: ...
def profile_run(
    traces: str | os.PathLike[str] | Sequence[str],
    *,
    plan: str | os.PathLike[str] | None = None,
    model: str | None = None,
    on: str | None = None,
    layout: str | None = None,
    batch_tokens: str | float | None = None,
    seq_len: str | int | None = None,
    batch: int | None = None,
    context: str | int | None = None,
    phase: Literal["decode", "prefill"] = "decode",
    precision: str | None = None,
    against: str | os.PathLike[str] | Sequence[str] | None = None,
    step: str | None = None,
) -> Diagnosis: ...
def roofline(
    expression: str,
    *,
    on: str,
    sizes: str | Mapping[str, int] | None = None,
    vary: str | None = None,
    memory: Literal["hbm", "vmem", "host"] = "hbm",
    padding: bool = True,
    flops_per_s: str | float | None = None,
    memory_bandwidth: str | float | None = None,
) -> RooflineCase: ...
def rule(
    name: str | None = None,
    *,
    on: str | None = None,
    cluster: str | os.PathLike[str] | None = None,
    values: str | Mapping[str, float] | None = None,
    solve: str | None = None,
    model: str | None = None,
    dtype: Literal["fp32", "tf32", "bf16", "fp16", "fp8", "int8", "int4", "fp4", "mxfp4"] = "bf16",
) -> RuleAnswer: ...
def run_plan(
    plan: Plan | PlanResult | str | os.PathLike[str],
    *,
    steps: int = 20,
    learning_rate: float = 0.0003,
    text: str | os.PathLike[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    weights: str | os.PathLike[str] | None = None,
    checkpoint: str | None = None,
    every: int | None = None,
    cpu_devices: int | None = None,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    seed: int = 0,
    warmup_steps: int = 0,
    learning_rate_decay: Literal["none", "linear", "cosine"] = "none",
    decay_steps: int | None = None,
    final_learning_rate: float | None = None,
    token_file: str | os.PathLike[str] | None = None,
    token_format: Literal["uint16", "uint32"] | None = None,
    documents: str | None = None,
    evaluate: str | os.PathLike[str] | None = None,
    evaluate_every: int | None = None,
    evaluate_batches: int | None = None,
    clip_gradients: float | None = None,
    beta1: float | None = None,
    beta2: float | None = None,
    epsilon: float | None = None,
    weight_decay: float | None = None,
    decayed: Literal["all", "matrices"] | None = None,
    unroll_layers: bool | None = None,
    metrics: str | None = None,
    tensorboard: str | None = None,
    wandb: str | None = None,
    keep: int | None = None,
    profile: str | None = None,
    progress: Callable[[str], None] = ...,
    say: Callable[[str], None] = ...,
    saved: Callable[[int], None] = ...,
    **job: Any,
) -> RunResult: ...
def scale_train(
    model: str,
    *,
    on: str | None = None,
    batch_tokens: str | float,
    seq_len: str | float,
    tokens: str | float | None = None,
    precision: str = "mixed",
    optimizer: str = "adamw",
    fine_tune: str = "full",
    tool: str | Sequence[str] | None = None,
    objective: Literal["time", "cost", "chips"] = "time",
    deadline: str | float | None = None,
    budget: str | float | None = None,
    max_chips: int | None = None,
    max_memory: str | float | None = None,
    fix: str | Mapping[str, Any] | None = None,
    forbid: str | Sequence[str] | None = None,
    within: str | float = 0.02,
    top: int = 5,
    batch_slack: str | float = 0.1,
    expert_imbalance: float | None = None,
    capacity_factor: float | None = None,
    cluster: str | os.PathLike[str] | None = None,
    price: str | float | None = None,
    calibration: str = "fitted",
    anchor: str | os.PathLike[str] | None = None,
    front: bool = False,
    offload: bool = False,
    sensitivity: bool = False,
    progress: Callable[[str], None] = ...,
    time_limit: float | None = None,
) -> Scaling: ...
def score(
    file: str | os.PathLike[str],
    *,
    calibration: str | None = None,
    progress: Callable[[str], None] = ...,
) -> TrainingScore | ServingScore: ...
def shard(
    expression: str,
    *,
    on: str | None = None,
    cluster: str | os.PathLike[str] | None = None,
    mesh: str | Mapping[str, int] | None = None,
    sizes: str | Mapping[str, int] | None = None,
    wires: str | None = None,
    dtype: Literal["fp32", "tf32", "bf16", "fp16", "fp8", "int8", "int4", "fp4", "mxfp4"] = "bf16",
    overlap: bool = False,
) -> Product: ...
def simulate_serve(
    costs: EngineCosts | ServingPlan | ServingPlanResult | ServingEstimate | str | os.PathLike[str],
    *,
    rate: float | None = None,
    prompt: str | float = "1024",
    output: str | float = "256",
    arrivals: str = "poisson",
    requests: str | int | None = None,
    csv: str | os.PathLike[str] | None = None,
    seed: int = 0,
    max_ttft: str | float | None = None,
    max_tpot: str | float | None = None,
    share: float = 0.99,
    capacity: bool = False,
    replicas: int = 1,
    routing: Literal["round-robin", "least-loaded", "affinity"] = "least-loaded",
    policy: Literal["prefill-first", "decode-first", "chunked"] = "prefill-first",
    max_batch: int = 256,
    max_step_tokens: int = 2048,
    prefill_replicas: int = 0,
    autoscale: str | None = None,
    prefix_tokens: int = 0,
    prefix_groups: int = 1,
    preemption: Literal["recompute", "swap"] = "recompute",
    watermark: float = 0.01,
    prefix_cache: bool = False,
    speculate: str | None = None,
    prefill_costs: str | os.PathLike[str] | None = None,
    jobs: int = 1,
    spans: int = 0,
    progress: Callable[[str], None] | None = None,
) -> ServedLoad: ...
def sweep(
    file: str | os.PathLike[str],
    *,
    command: str | None = None,
    keep_going: bool = False,
    jobs: int | None = None,
    ray: str | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] = ...,
) -> Sweep: ...
