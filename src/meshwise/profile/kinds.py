"""What an operation is, from its name: category, activity, kind of collective.

Names of kernels are hints and no more; where the framework's own operation or the HLO is known, it decides. Not here:
HLO (`reading.hlo`), FLOPs and bytes (`work`).
"""

from __future__ import annotations

import re
from functools import lru_cache

from meshwise.profile.trace import Activity

#: Categories, in the order in which reports show them.
CATEGORIES = (
    "matmul", "attention", "convolution", "normalization", "softmax", "elementwise", "reduction", "embedding",
    "recurrence", "routing", "sampling", "optimizer", "cache", "layout", "copy", "memset", "collective", "custom",
    "control", "host", "other",
)  # fmt: skip

_COLLECTIVE_KERNEL = re.compile(
    r"(nccl|rccl|nvshmem|oneccl).*?(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast|send_?recv|send|recv"
    r"|reduce|generic|barrier)"
    r"|(?<![a-z])(cross_device_reduce|one_?shot_all_?reduce|two_?shot_all_?reduce|multimem_all_?reduce|quickreduce"
    r"|cross_rank|all_?reduce_(?:fusion|residual|rms)\w*|aiter::\w*all_?reduce\w*|reduce_scatter_cross_device)"
    r"|(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)\w*kernel|deep_ep::|moeA2A|userbuffers_|msccl|rccl_main"
    r"|mori::|\bEp(Dispatch|Combine)|pplx::",
    re.IGNORECASE,
)
_KINDS = (
    ("reduce-scatter", "reducescatter"),
    ("all-gather", "allgather"),
    ("all-to-all", "alltoall|deepep|moea2a|epdispatch|epcombine"),
    ("all-reduce", "allreduce|crossdevicereduce|oneshot|twoshot|quickreduce|multimem"),
    ("broadcast", "broadcast"),
    ("collective-permute", "collectivepermute|ppermute"),
    ("send-recv", "sendrecv|send|recv|p2p"),
    ("reduce", "reduce"),
    ("barrier", "barrier"),
)


#: Ends the name of an asynchronous operation where it stands from its start to its end.
IN_FLIGHT = " in flight"
_PARTS = re.compile(r"(start|done)[.\d]*(\.cloned[.\d]*)?$")
_ENDS = re.compile(r"done[.\d]*(\.cloned[.\d]*)?$")


def is_part(name: str) -> bool:
    """Whether an instruction of XLA starts or ends an asynchronous operation.

    >>> is_part("all-gather-start.5"), is_part("all-reduce.call-done.1"), is_part("copy-start.1 in flight")
    (True, True, False)
    """
    return _PARTS.search(name) is not None


def is_end(name: str) -> bool:
    """Whether an instruction of XLA ends an asynchronous operation, or is one in flight that bears this name.

    >>> is_end("copy-done.1"), is_end("copy-done.1 in flight"), is_end("copy-start.1")
    (True, True, False)
    """
    return _ENDS.search(name.removesuffix(IN_FLIGHT)) is not None


@lru_cache(maxsize=4096)
def collective_kind(name: str) -> str:
    """The kind of collective that a name means, `collective` if it says none.

    >>> collective_kind("ncclDevKernel_AllReduce_Sum_bf16_RING_LL"), collective_kind("_allgather_base")
    ('all-reduce', 'all-gather')
    >>> collective_kind("ncclDevKernel_Generic")
    'collective'
    """
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    return next((kind for kind, words in _KINDS if re.search(words, plain)), "collective")


@lru_cache(maxsize=65536)
def is_collective(kernel: str) -> bool:
    """Whether a kernel's name is that of a communication library.

    >>> is_collective("ncclDevKernel_ReduceScatter_Sum_bf16"), is_collective("void at::native::reduce_kernel<512>")
    (True, False)
    """
    return _COLLECTIVE_KERNEL.search(kernel[:400]) is not None


#: Category -> words of which a kernel's name has one, tried in order.
_KERNELS = {
    "cache": (
        "reshape_and_cache store_kv set_kv kv_?cache_(copy|write|store) kv_cache concat_and_cache set_mla gather_cache "
        "kv_indices kv_splits kv_blocks slot_mapping req_to_token alloc_(extend|decode) cat_and_cache set_k_and_s"
    ),
    "routing": (
        "moe_(align|sum) topk_?gating fused_moe_sort moe_?sort count_and_sort permute_moe moe_permute routing "
        "finalizeKernel expandInputRows grouped_topk moe_fused_gate ep_(scatter|gather) "
        "topk_(softmax|sigmoid|forward) fused_topk expert_(offsets|histogram) shared_experts expt_data"
    ),
    "attention": (
        "flash(?!infer) fmha attn attention mha_ sdpa paged_?decode mla_ splash With(Paged|Ragged)?KVCache MergeStates "
        "aiter(::|\\d+)pa_ _kernel_stage\\d ^_?(fwd|bwd)_kernel bwd_kernel_ bwd_preprocess mha\\b "
        "merge_states? reduce_segments mqa_logits pa_(decode|prefill|sparse) decode_att_"
    ),
    "recurrence": (
        "selective_(scan|state) ssd_ chunk_(scan|state|cumsum|fwd|kda) state_passing causal_conv1d delta_rule rwkv lru_"
    ),
    "convolution": (
        "conv(?!ert) dgrad wgrad fprop igemm winograd scudnn cudnn.*_nhwc_ nchwToNhwc nhwcToNchw miopen(?!BatchNorm)"
    ),
    "matmul": (
        "gemm(?!a(_|\\d|rms)) gemv cijk_ nvjet xmma wgmma cutlass.*(mma|matmul) matmul splitk _mm_ \\bmm_ "
        "tem_fused_(mm|addmm|bmm) \\bbmm_ dot_kernel cublas grouped_mm (scaled|flat)_?mm fused_moe fmoe moe_kernel "
        "marlin gmm\\b ^dot cutlass_\\w*(tensorop|simt) lora_(shrink|expand) machete"
    ),
    "optimizer": "(?<!h)adam multi_tensor_apply _foreach sgd lamb_ lion_ fused_optim lpnorm clip_grad",
    "normalization": (
        "(rms|layer|batch|group|add_rms|instance|l2|qk)_?norm rms_kernel bn_fw bn_bw _norm_kernel GammaBeta"
    ),
    "sampling": (
        "sampl argmax top_?p\\b multinomial penalt bitmask radix_?sort devicesort bitonicsort topk philox distribution "
        "temperature min_p"
    ),
    "softmax": "softmax cross_?entropy logsumexp nll_loss",
    "embedding": (
        "(?<!rotary_)embedding index_?select gather_kernel vocab_parallel indexing_backward index_put embed_ tbe_"
    ),
    "layout": (  # names of Inductor's kernels list all that they fuse: casts and views, too
        "^(?!triton_(poi|red|per)_fused).*((?<!cast_)transpose|permute|copy|cat(array|ed|_)|contiguous|pad_kernel"
        "|slice_kernel|SubTensorOp) memcpy "
        "^triton_poi_fused(_(clone|cat|transpose|permute|constant_pad_nd|slice|view|unsqueeze|expand))+(_\\d+)?(\\.kd)?$"
    ),
    "memset": "memset fillbuffer fillfunctor zero_kernel",
    "reduction": (
        "reduce triton_(red|per)_ sum_kernel welford cumsum scan_?kernel scan_(inner|outer) devicereduce max_pool "
        "avg_pool histogram"
    ),
    "elementwise": (
        "elementwise vectorized pointwise triton_(poi|_\\d) functor _and_mul activation silu gelu swiglu rotary rope "
        "act_ quant cast convert cvt_ add_kernel mul_kernel where arange binary unary dropout loop_.*fusion "
        "wrapped_ kn_entry_ geglu gated_kernel hadamard cast_transpose"
    ),
}
_KERNEL_PATTERNS = tuple((kind, re.compile(words.replace(" ", "|"), re.IGNORECASE)) for kind, words in _KERNELS.items())

#: Category -> words of which the name of a framework's operation has one; it decides before the kernel's name does.
_PARENTS = {
    "attention": "attention flash_attn mha_ _sdpa flex_attn mla_",
    "convolution": "conv(olution|\\d|_) miopen_conv cudnn_conv",
    "matmul": (
        "::(mm|addmm|bmm|baddbmm|matmul|linear|_scaled_mm|_grouped_mm|mv|addmv|dot|einsum|_int_mm)$ ::\\w*gemm\\w*$ "
        "::scaled_mm\\w*$ ::(inplace_|outplace_)?fused_experts\\w*$ ::_?moe_forward\\w*$"
    ),
    "optimizer": "::_fused_adam ::_foreach_(?!copy) optimizer",
    "layout": "::_foreach_copy fsdp::\\w*(copy|cat) ::split_with_sizes_copy",
    "normalization": "_norm(_|$) layer_norm rms_norm batch_norm",
    "routing": "^_moe_C:: topk_softmax grouped_topk moe_align moe_sum",
    "softmax": "softmax cross_entropy nll_loss",
    "embedding": "(?<!rotary_)embedding index_select ::index$ ::index_put",
}
_PARENT_PATTERNS = tuple((kind, re.compile(words.replace(" ", "|"), re.IGNORECASE)) for kind, words in _PARENTS.items())

#: What helps a product or an attention, and is neither: its kernel's name is believed before the parent's.
_HELPERS = frozenset({"memset", "cache", "copy"})
#: What an attention is made of that is not fused.
_NOT_FUSED = frozenset({"matmul", "softmax"})


@lru_cache(maxsize=65536)
def kernel_category(kernel: str, parent: str = "") -> str:
    """The category of a kernel, from the operation that launched it, else from its name.

    >>> kernel_category("Cijk_Alik_Bljk_BBS_BH"), kernel_category("elementwise_kernel", "aten::mm")
    ('matmul', 'matmul')
    >>> kernel_category("reshape_and_cache_flash_kernel", "vllm::unified_attention_with_output")
    'cache'
    """
    own = next((category for category, pattern in _KERNEL_PATTERNS if pattern.search(kernel[:600])), "other")
    if own in _HELPERS or not parent:
        return own
    found = next((category for category, pattern in _PARENT_PATTERNS if pattern.search(parent)), own)
    return own if found == "attention" and own in _NOT_FUSED else found


_MOVES = re.compile(r"__amd_rocclr_(copy|fill)|memcpy|memset|copybuffer|fillbuffer", re.IGNORECASE)


def short_name(kernel: str) -> str:
    """A kernel's name without types, namespaces and arguments; names that are no C++ stay.

    >>> short_name("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, x>(int)")
    'vectorized_elementwise_kernel<CUDAFunctor_add>'
    >>> short_name("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)"), short_name("fusion.12")
    ('ncclDevKernel_Generic', 'fusion.12')
    """
    plain = kernel.removeprefix("void ").replace("(anonymous namespace)::", "")
    head = re.match(r"[\w:~.$\-]+", plain)
    if head is None or ("(" not in plain and "<" not in plain):
        return kernel
    functor = re.search(r"(\w*[Ff]unctor\w*|\w+_kernel_cuda|\w+Op)\b", plain[head.end() :])
    return head[0].rpartition("::")[2] + (f"<{functor[1]}>" if functor else "")


def kernel_activity(kernel: str, event: str) -> Activity:
    """What a GPU event keeps busy: `event` is `kernel`, `gpu_memcpy` or `gpu_memset`."""
    if is_collective(kernel):
        return Activity.COLLECTIVE
    if event != "kernel" or _MOVES.match(kernel):
        return Activity.COPY
    return Activity.COMPUTE


#: Element type as frameworks write it -> in short.
_DTYPES = {
    "c10::bfloat16": "bf16", "bfloat16": "bf16", "c10::half": "fp16", "half": "fp16", "float16": "fp16",
    "float": "fp32", "float32": "fp32", "double": "fp64", "float64": "fp64", "long": "int64", "long int": "int64",
    "int64": "int64",
    "int": "int32", "int32": "int32", "short": "int16", "signed char": "int8", "char": "int8", "int8": "int8",
    "unsigned char": "uint8", "byte": "uint8", "uint8": "uint8", "bool": "bool", "c10::float8_e4m3fn": "fp8",
    "c10::float8_e4m3fnuz": "fp8", "c10::float8_e5m2": "fp8", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8",
    "fp8_e4m3": "fp8", "bf16": "bf16", "f32": "fp32", "f16": "fp16", "f64": "fp64", "s32": "int32", "u32": "uint32",
    "s64": "int64", "u64": "uint64", "s8": "int8", "u8": "uint8", "pred": "bool", "s16": "int16", "u16": "uint16",
    "f8e4m3fn": "fp8", "f8e5m2": "fp8", "f8e4m3b11fnuz": "fp8", "f8e4m3fnuz": "fp8", "s4": "int4", "u4": "int4",
    "f4e2m1fn": "fp4", "tf32": "tf32",
}  # fmt: skip
_BITS = {"bool": 8, "fp64": 64, "tf32": 32, "fp8": 8, "fp4": 4}


def short_dtype(name: str) -> str:
    """The element type in short, as written where it is not known.

    >>> short_dtype("c10::BFloat16"), short_dtype("f32"), short_dtype("Half")
    ('bf16', 'fp32', 'fp16')
    """
    return _DTYPES.get(name.lower(), name.lower())


def dtype_bytes(dtype: str) -> float | None:
    """Bytes of one element of a short dtype, None if it has no size (`scalar`).

    >>> dtype_bytes("bf16"), dtype_bytes("int4"), dtype_bytes("scalar")
    (2.0, 0.5, None)
    """
    bits = _BITS.get(dtype)
    if bits is None:
        found = re.search(r"\d+$", dtype)
        bits = int(found[0]) if found else None
    return None if bits is None else bits / 8
