"""The commands whose answers are kept: about 1,000, over every verb that needs no accelerator and no compiler.

Test support. `training`, `serving`, ... give the words of one command each, without `meshwise` and `--json`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle, product

DENSE = ("llama-3-8b", "gemma-3-27b", "gpt2-xl", "llama-3-70b", "phi-4")
MIXED = ("mixtral-8x7b", "deepseek-v3", "qwen3-30b-a3b", "gpt-oss-120b", "llama-4-scout")
OTHERS = ("jamba-v0.1", "qwen3-next-80b-a3b", "t5-11b", "granite-4.0-h-micro-base", "deepseek-v3.2", "gemma-4-26b-a4b")

#: Clusters with 64 chips: a torus, a line of slices, a twisted torus, NVLink under one or two levels of switches.
CLUSTERS = (
    "v5p:4x4x4",
    "v5e:8x8",
    "h100:64",
    "v6e:4x4*4",
    "h100:64@meta-roce",
    "gb200-nvl72:64",
    "v4:4x4x4",
    "mi300x:64",
)

#: Layouts of 64 chips for any model.
LAYOUTS = (
    "fsdp=64,remat=full", "fsdp=16,tensor=4,remat=full", "data=16,tensor=4,zero=1,remat=full",
    "data=8,fsdp=8,zero=2,remat=matmuls", "fsdp=32,tensor=2,sequence_parallel=off,remat=full",
    "fsdp=16,context=4,remat=full", "fsdp=8,context=4,tensor=2,context_method=ring,remat=full",
    "fsdp=16,ulysses=4,remat=full", "data=4,context=2,tensor=8,zero=1,fully_sharded=off,remat=full",
    "fsdp=64,remat=full,offload=optimizer+activations", "fsdp=64,remat=none", "data=64,zero=0,remat=full",
    "fsdp=16,tensor=4,collective_matmul=bidirectional,remat=full", "fsdp=64,remat=full,remat_layers=4",
)  # fmt: skip
PIPELINES = (
    "stage=4,data=16,zero=1,num_microbatches=8,schedule=1f1b,remat=full",
    "stage=4,fsdp=16,num_microbatches=8,schedule=gpipe,remat=full",
    "stage=4,data=8,tensor=2,zero=1,num_microbatches=8,schedule=interleaved,virtual_stages=2,remat=full",
    "stage=4,data=16,zero=1,num_microbatches=8,schedule=zb-h1,remat=full",
    "stage=4,data=16,zero=1,num_microbatches=8,schedule=zb-v,remat=full",
    "stage=4,data=16,zero=1,num_microbatches=8,schedule=dualpipe,remat=full",
    "stage=4,data=16,zero=1,num_microbatches=8,schedule=dualpipe-v,remat=none",
)
EXPERTS = (
    "expert=8,fsdp=8,remat=full", "expert=8,data=8,zero=1,remat=full", "expert=4,fsdp=8,tensor=2,remat=full",
    "expert=4,fsdp=8,tensor=2,expert_tensor_parallel=off,remat=full", "expert=8,context=2,fsdp=4,remat=matmuls",
    "expert=8,data=8,zero=1,fully_sharded=off,remat=full",
    "stage=4,expert=8,data=2,zero=1,num_microbatches=8,schedule=dualpipe,remat=full",
)  # fmt: skip
PRECISIONS = ("bf16", "mixed", "fp8", "fp8-block", "mxfp8", "nvfp4", "fp32", "int8")
OPTIMIZERS = ("adamw", "adam8bit", "adafactor", "muon", "lion", "sgd")
TUNING = ("full", "lora", "qlora", "lora:rank=64", "qlora:rank=8")
CALIBRATIONS = ("fitted", "operations", "none")
SERVED = ("llama-3-70b", "llama-3-8b", "deepseek-v3", "mixtral-8x7b", "gemma-3-27b", "gpt-oss-120b", "qwen3-30b-a3b")
SERVERS = ("h100:8", "v5e:2x4", "v5p:2x2x2", "b200:8", "v6e:2x4", "mi300x:8")
JOB = "--batch-tokens 512Ki --seq-len 4096"


def training() -> Iterator[str]:
    """One training layout each."""
    for model, (cluster, layout) in product(DENSE, zip(cycle(CLUSTERS), (*LAYOUTS, *PIPELINES), strict=False)):
        yield f"estimate train {model} --on {cluster} {_job(model)} --layout {layout}"
    for model, (cluster, layout) in product(
        MIXED, zip(cycle(CLUSTERS), (*EXPERTS, *LAYOUTS, *PIPELINES), strict=False)
    ):
        yield f"estimate train {model} --on {cluster} {_job(model)} --layout {layout}"
    for model, (cluster, layout) in product(OTHERS, zip(cycle(CLUSTERS[1:]), LAYOUTS, strict=False)):
        yield f"estimate train {model} --on {cluster} {_job(model)} --layout {layout}"
    for model, cluster in product(("llama-3-8b", "deepseek-v3"), CLUSTERS[:3]):
        for precision, calibration in zip(PRECISIONS, cycle(CALIBRATIONS), strict=False):
            yield (
                f"estimate train {model} --on {cluster} {_job(model)} --layout fsdp=32,tensor=2 "
                f"--precision {precision} --calibration {calibration}"
            )
        for optimizer, calibration in zip(OPTIMIZERS, cycle(CALIBRATIONS[1:]), strict=False):
            yield (
                f"estimate train {model} --on {cluster} {_job(model)} --layout fsdp=16,data=4,zero=1 "
                f"--optimizer {optimizer} --calibration {calibration}"
            )
        for tuning in TUNING:
            yield f"estimate train {model} --on {cluster} {_job(model)} --layout fsdp=16,tensor=4 --fine-tune {tuning}"


def _job(model: str) -> str:
    return "--batch-tokens 512Ki --seq-len 1024" if model == "gpt2-xl" else JOB


def serving() -> Iterator[str]:
    """One serving layout each."""
    layouts = ("tensor=8", "tensor=4,replicas=2", "tensor=2,stage=4", "tensor=4,cache=2,cache_split=batch",
               "tensor=2,width=4", "expert=8", "tensor=2,expert=4", "fsdp=8")  # fmt: skip
    options = ("", "--precision fp8", "--precision int8", "--chunk 512", "--prefill-batch 2", "--calibration none")
    mixes = (
        "--prompt 1024 --output 256 --batch 32",
        "--prompt 6144 --output 1024 --batch 8",
        "--prompt 128 --output 32 --batch 4",
    )
    turns = zip(cycle(options), cycle(mixes))
    for model, server, layout in product(SERVED, SERVERS, layouts[:5]):
        other, mix = next(turns)
        wide = layouts[5 + len(model) % 3] if "fsdp" not in layout and layout.startswith("tensor=2,width") else layout
        yield f"estimate serve {model} --on {server} --layout {wide} {mix} {other}".rstrip()
    apart = "--mode disaggregated --layout tensor=4 --prefill-layout tensor=4"
    for model, server in product(SERVED[:4], SERVERS[:3]):
        yield f"estimate serve {model} --on {server} --prompt 2048 --output 128 --batch 16 {apart} --precision fp8"


def searches() -> Iterator[str]:
    """Searches for training."""
    for model, cluster in product(
        ("llama-3-8b", "gpt2-xl", "gemma-3-27b"), ("v5e:4x4", "h100:16", "v5p:2x2x4", "v6e:4x8", "h100:64")
    ):
        yield f"plan train {model} --on {cluster} {_job(model)}"
    for model, cluster in (("mixtral-8x7b", "h100:64"), ("qwen3-30b-a3b", "v5p:4x4x4"), ("gpt-oss-120b", "h100:64"),
                           ("jamba-v0.1", "h100:32"), ("t5-11b", "v5e:8x8"),
                           ("granite-4.0-h-micro-base", "v5e:4x4")):  # fmt: skip
        yield f"plan train {model} --on {cluster} {_job(model)}"
    for option in ("--precision mixed", "--precision fp8-block", "--fix tensor=4", "--forbid pipeline",
                   "--objective cost", "--max-memory 50%", "--calibration none", "--calibration operations",
                   "--optimizer muon", "--fine-tune lora", "--forbid remat=none --fix fully_sharded=on",
                   "--max-chips 16", "--sensitivity", "--top 10"):  # fmt: skip
        yield f"plan train llama-3-8b --on h100:32 {JOB} {option}"
    yield "plan train llama-3-70b --on v5p:16x20x28 --batch-tokens 4Mi --seq-len 4096 --tokens 15T"
    yield "plan train llama-3-70b --on h100:512 --batch-tokens 4Mi --seq-len 8192"
    yield f"plan train llama-3-8b --on h100:16,v5e:4x4 {JOB} --tokens 1T"
    yield f"plan train llama-3-8b --on h100:32 {JOB} --tokens 1T --scaling"


def serving_searches() -> Iterator[str]:
    """Searches for serving."""
    for model, server in product(SERVED, ("h100:8", "v5e:2x4", "h100:4")):
        yield f"plan serve {model} --on {server} --prompt 1024 --output 256 --precision fp8"
    for option in ("--max-ttft 500ms --max-tpot 30ms", "--mode aggregated", "--mode disaggregated", "--objective tpot",
                   "--objective throughput", "--max-batch 64", "--objective cost", "--rate 5"):  # fmt: skip
        yield f"plan serve llama-3-70b --on h100:16 --prompt 1024 --output 256 --precision fp8 {option}"
    targets = "--max-ttft 500ms --max-tpot 30ms"
    yield f"plan serve llama-3-70b --on h100:64 --prompt 1024 --output 256 --precision fp8 {targets}"
    yield "plan serve llama-3-8b --on h100:8,v5e:2x4 --prompt 1024 --output 256"
    for asked in ("--max-ttft 300ms --max-tpot 30ms", "--rate 30", "--rate 20 --max-ttft 300ms --share 0.95"):
        yield f"plan serve llama-3-8b --on h100:8 --prompt 1024 --output 128 --simulate {asked}"


def simulations() -> Iterator[str]:
    """Timelines of a step, and traffic through engines."""
    for model, layout in product(("llama-3-8b", "mixtral-8x7b", "gemma-3-27b"), (*PIPELINES, *LAYOUTS[:4])):
        yield f"simulate train {model} --on h100:64 {JOB} --layout {layout}"
    engine = "simulate serve {engine} --prompt 1024 --output 128 --requests 2k"
    for rate, option in product((1, 4, 20), ("", "--policy chunked --max-step-tokens 512", "--policy decode-first",
                                              "--replicas 3", "--ttft 500ms --tpot 30ms")):  # fmt: skip
        yield f"{engine} --rate {rate} {option}".rstrip()


def small() -> Iterator[str]:
    """Models, rooflines, products, collectives, clusters."""
    for model in (*DENSE, *MIXED, *OTHERS, "t5-11b", "kimi-k2", "qwen3-vl-8b", "palm-540b", "bloom-176b"):
        yield f"model {model}"
        yield f"model {model} --seq-len 8192"
    operation = '"bf16[B, D] * int8[D, F] -> bf16[B, F]"'
    for chip, batch in product(("v5e", "v5p", "h100", "b200", "mi300x", "v6e"), (1, 64, 512)):
        yield f"roofline {operation} --on {chip} --set B={batch},D=8192,F=32Ki"
    for expression in ("A[I_X, J] * B[J, K_Y] -> C[I_X, K_Y]", "A[I, J_X] * B[J_X, K] -> C[I, K]",
                       "A[I_X, J] * B[J_X, K] -> C[I_X, K]", "A[I, J_X] * B[J_X, K] -> C[I, K_X]",
                       "A[I_XY, J] * B[J, K] -> C[I, K]", "A[I_X, J] * B[J, K_X] -> C[I, K]"):  # fmt: skip
        yield f'shard "{expression}" --mesh X=4,Y=8'
        yield f'shard "{expression}" --mesh X=4,Y=4 --on v5e:4x4 --set I=4096,J=8192,K=8192'
    for kind, (size, on) in product(("all-gather", "reduce-scatter", "all-reduce", "all-to-all"),
                                    (("16", "v5e:16x16"), ("16", "v5p:4x4x4"), ("8", "h100:64"), ("64", "h100:64"),
                                     ("4", "v5e:4x4"), ("32", "v6e:4x8"))):  # fmt: skip
        array = {
            "all-gather": "bf16[1024, 4096_X]",
            "reduce-scatter": "bf16[1024, 4096_X]",
            "all-reduce": "bf16[1024, 4096]",
            "all-to-all": "bf16[1024_X, 4096] -> bf16[1024, 4096_X]",
        }[kind]
        for calibration in ("", " --calibration operations"):
            yield f'collective {kind} "{array}" --mesh X={size} --on {on}{calibration}'
    for cluster in (*CLUSTERS, "v5p-128", "v5p:8x8x16*2", "h100-sxm:16384@meta-roce", "v5p:4x4x8_twisted"):
        yield f"clusters {cluster}"


def refusals() -> Iterator[str]:
    """What is refused; the exit code and the kind of the error are kept."""
    train = "estimate train llama-3-8b --on h100:64 " + JOB
    for layout in ("tensor=3", "data=128", "tensor=64", "zero=4", "remat=most", "foo=2", "data=-1,fsdp=-1", "stage=5",
                   "tensor=4,tensor=2", "expert=8", "virtual_stages=2", "schedule=zigzag"):  # fmt: skip
        yield f"{train} --layout {layout}"
    yield "estimate train llama-9 --on h100:64 " + JOB
    yield "estimate train llama-3-8b --on h101:64 " + JOB
    yield "estimate train llama-3-8b --on v5p:3x5x7 " + JOB
    yield "estimate train llama-3-8b --on h100:64 --batch-tokens 512K --seq-len 4096 --layout fsdp=64 --precision fp3"
    yield 'shard "A[I_X, J] * B[J, K_X -> C[I, K]" --mesh X=4'
    yield 'roofline "bf16[B, D] * int8[E, F] -> bf16[B, F]" --on v5e --set B=1'


#: Verb group -> its commands.
GROUPS: dict[str, Callable[[], Iterator[str]]] = {
    "training": training, "serving": serving, "searches": searches, "serving_searches": serving_searches,
    "simulations": simulations, "small": small, "refusals": refusals,
}  # fmt: skip
