"""Kernels of the libraries that serve and train models, by their names alone: as in replayed graphs."""

import pytest

from meshwise.hardware import load_chip
from meshwise.profile import profile_traces
from meshwise.profile.kinds import collective_kind, kernel_activity, kernel_category
from meshwise.profile.optimes import OpTime, roofline_of
from meshwise.profile.trace import Activity, Device, Marker, OpKind, StreamBuilder, Trace
from tests.each import each

#: Category -> kernels, as profilers write them (template arguments shortened).
KERNELS = {
    "attention": """
        fmhaSm100fKernel_QkvBfloat16OBfloat16H128PagedKvCausalP64MultiCtasKvVarSeqQ8Kv128StaticSwapsAbForGen
        fmhaSm100aKernel_QkvE4m3OBfloat16H128PagedKvCausalP32VarSeqQ128Kv128PersistentContext
        void tensorrt_llm::kernels::fmhaReductionKernel<128, 64, false, true>(KernelParams)
        void flashinfer::BatchPrefillWithRaggedKVCacheKernel<flashinfer::KernelTraits<(flashinfer::MaskMode)1, 128u>>
        void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits<(flashinfer::MaskMode)0, 16u>>
        void flashinfer::BatchDecodeWithPagedKVCacheKernel<(flashinfer::PosEncodingMode)0, 2u, 8u, 16u>(DecodeParams)
        void flashinfer::PrefillWithKVCacheKernel<CollectiveMainloop<flashinfer::AttentionKernelTraits<false>>>
        void flashinfer::PersistentVariableLengthMergeStatesKernel<8u, 16u, 8u, 4u, float, __nv_bfloat16, int>
        void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloop>>>
        void cutlass::device_kernel<cutlass::fmha::kernel::Sm100FmhaMlaKernelTmaWarpspecialized<cute::tuple<int>>>
        void cutlass::device_kernel<cutlass::fmha::kernel::Sm100FmhaFwdKernelTmaWarpspecialized<cute::tuple<int>>>
        void flash::flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4>, 8, 7, true>
        kernel_cutlass_kernel_flash_attncuteflash_fwd_sm100FlashAttentionForwardSm100_object_at__tensorptrbf16gmem
        cudnn_generated_fort_native_sdpa_sm100_flash_fprop_f16_knob_6_128x128x128_4x1x1_kernel0_0
        fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>::Params)
        kernel_unified_attention_2d
        kernel_unified_attention_3d
        _fwd_grouped_kernel_stage1
        _fwd_kernel_stage2
        triton_tem_fused_flex_attention_0
        aiter::fmha_fwd_hd128_bf16_causal_group
        aiter::fmha_bwd_hd128_bf16_causal_a32_rtz_psskddv
        aiter::pa_bf16_pertokenFp8_gqa8_2tg_4w
        aiter::mla_a8w8_qh16_qseqlen1_gqaratio16
        _ZN7ck_tile6kentryILi1ENS_13FmhaFwdKernelINS_24BlockFmhaPipelineQRKSVSE
        void ck_tile::kentry<256, 2, ck_tile::FmhaBwdDQDKDVKernel<ck_tile::BlockFmhaBwdPipelineDefaultPolicy>>
        void ck_tile::kentry<64, 2, ck_tile::FmhaBwdOGradDotOKernel<ck_tile::BlockFmhaBwdOGradDotO>>
        kn_mla_reduce_v1_ps<MlaReduceKernelV1Traits<512, 128>>
        void paged_attention_ll4mi_QKV_mfma16_kernel<__hip_bfloat16, __hip_bfloat16, 16, 128, 256, false, 4>
        void paged_attention_ll4mi_reduce_kernel<__hip_bfloat16, 128, 128, 256, 1>
        attn_fwd
        bwd_kernel_dk_dv
        bwd_kernel_fuse
        bwd_preprocess
        _ZN5aiter18pa_bf16_pertokenFp8_gqa8_1tg_4wE
        void merge_state_v2_kernel<__nv_bfloat16, 128>
        reduce_segments
        kernel_mha
        mla_pfl_qh192_vh128_m32x8_n128x1_causal1
        _gluon_fp8_paged_mqa_logits
        pa_decode_gluon
        void sm90_fp8_paged_mqa_logits<32, 64, 128, 64, 3, 64, 4, 128, 512>
    """,
    "matmul": """
        nvjet_sm100_tst_128x24_64x11_2x1_v_bz_TNT
        nvjet_qss_192x128_128x5_1x2_h_bz_coopA_NTT
        nvjet_sm100_tst_mma_192x192x64_4_2x2_2cta_h_bz_splitK_TNT
        cutlass3x_sm100_tensorop_s128x256x16gemm_bf16_bf16_f32_void_bf16_128x256x64_2x1x1_0_tnn_align8_2sm_bias
        void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_tn_align8>(Params)
        void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>>>
        bmm_E2m1_E2m1E2m1_Fp32_bA16_bB16_bC16_t128x8x512_s7_et128x8_m128x8x64_cga1x1x1_16dp256b_rM_TN_transOut
        bmm_Bfloat16_E4m3E4m3_Fp32_t128x16x128u2_s5_et64x16_m64x16x32_cga1x1x1_16dp256b_TN_transOut
        void deep_gemm::sm100_fp8_gemm_1d1d_impl<(cute::UMMA::Major)0, 128u, 128u>(unsigned int)
        void deep_gemm::fp8_gemm_kernel<7168u, 2048u, 64u, 128u, 128u>(float*)
        _w8a8_block_fp8_matmul
        fused_moe_kernel
        void marlin::Marlin<__nv_bfloat16, 1125899906842624l, 256, 4, 8, 4, 4, 8, false>(int4 const*)
        void marlin_moe_wna16::Marlin<1125899906842624l, 256>
        void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>
        void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, 128, 16, 4>
        Cijk_Ailk_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64_MI16x16x1_SN_LDSB1_AFC1_GSUAMB
        Custom_Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_NTD_SK3_UserArgs_MT256x256x64_MI16x16x1_shortname0_gfx950
        void ck::kernel_gemm_xdl_cshuffle_v3_multi_d_b_preshuffle_2lds<ck::GridwiseGemmMultiD_xdl_cshuffle_v3>
        void ck::kernel_moe_mxgemm_2lds<ck::GridwiseMoeGemmMX_BPreshuffle<ck::tensor_layout::gemm::RowMajor>>
        void ck_tile::kentry<1, ck_tile::QuantGemmKernel<ck_tile::GemmTile1DPartitioner>>
        _gemm_afp4_wfp4_kernel_BLOCK_SIZE_M_32
        aiter::bf16gemm_fp32bf16_tn_64x64_splitk_clean
        aiter::fmoe_bf16_pertokenFp8_g1u1_vs_silu_1tg_32x256
        void wvSplitK_hf_sml_<__hip_bfloat16, 64, 2, 16, 8, 2, 1>(int, int, __hip_bfloat16 const*)
        void LLGemm1_kernel<__hip_bfloat16, 4>(__hip_bfloat16 const*)
        void tensorrt_llm::kernels::fused_a_gemm_kernel<1, 2112, 7168, 16, 16, 256, 16>
        router_gemm_kernel_float_output<__nv_bfloat16, 128, 8, 4, 256, 7168>
        _ZN5tgv_gemm4kernelE
        _w8a8_triton_block_scaled_mm
        aiter::flatmm_uk_gfx9_f16f8_128x256x128_1x4x1_16x16x32
        _lora_expand_kernel
        void machete::device::gemm
        _ZN5aiter42f4gemm_bf16_per1x32Fp4_BpreShuffle_192x128E
        void ck::kernel_moe_mxgemm_2lds<MulABScaleExpertWeightShuffled>
        cutlass3x_sm100_tensorop_s128x256x16gemm_bf16_bf16_f32_bf16_bf16_128x256x64_0_tnn_align8_2sm_bias_bf16_relu
    """,
    "routing": """
        void moe::dev::routing::routingRenormalize::routingIndicesClusterKernel<KernelParams<float>>
        void moe::dev::routing::routingDeepSeek::routingMainKernel<KernelParams<float, __nv_bfloat16>>
        void moe::dev::finalize::finalizeKernelVecLoad<KernelParams<cutlass::bfloat16_t>>
        void tensorrt_llm::kernels::cutlass_kernels::expandInputRowsKernel<__nv_bfloat16>
        void tensorrt_llm::kernels::cutlass_kernels::finalizeMoeRoutingKernel<__nv_bfloat16>
        void vllm::moe::topkGatingSoftmax<8, 128, 4, 16, 32, int>
        void vllm::moe::moe_align_block_size_kernel<int>
        void grouped_topk_opt_sort_kernel<__hip_bfloat16, float>
        void moe_fused_gate_kernel<cutlass::bfloat16_t, 8, 32, 8, 1, 4, 4>
        _fwd_kernel_ep_scatter_1
        _fwd_kernel_ep_gather
        void ck_tile::kentry<1, ck_tile::MoeSortingKernel<ck_tile::MoeSortingProblemEx<int, float, 1>>>
        void aiter::topk_softmax<float, 8>
        _fused_append_shared_experts_kernel
        _fused_dynamic_mxfp4_quant_moe_sort_kernel
        MoeSortingMultiPhaseKernel_P0_v2
        compute_expert_offsets
    """,
    "normalization": """
        void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(__nv_bfloat16*)
        void flashinfer::norm::RMSNormKernel<8u, __nv_bfloat16>(__nv_bfloat16*)
        void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*)
        void aiter::add_rmsnorm_quant_kernel<__hip_bfloat16, __hip_bfloat16, 256, 16>
        void ck_tile::kentry<1, ck_tile::Rmsnorm2dFwd<ck_tile::Rmsnorm2dFwdPipelineOnePass>>
        void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, false>
        void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<Kernel_traits<__nv_bfloat16>>
        _rms_norm_fwd_fused
        void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float, float, 64u, 1u>
        MIOpenBatchNormFwdTrainSpatial
        gemma_rmsnorm_kernel
        void local_device_load_rmsnorm_naive<__hip_bfloat16, 256, 2>
    """,
    "elementwise": """
        void flashinfer::activation::act_and_mul_kernel<__nv_bfloat16, &silu>(__nv_bfloat16*)
        void vllm::act_and_mul_kernel<c10::BFloat16, &vllm::silu_kernel, true>(c10::BFloat16*)
        void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*, c10::BFloat16*)
        void flashinfer::BatchQKApplyRotaryPosIdsCosSinCacheEnhancedKernel<true, 128u, 8u, 16u, __nv_bfloat16>
        void vllm::scaled_fp8_quant_kernel<c10::BFloat16>(c10::Float8_e4m3fn*)
        void per_token_group_quant_8bit_kernel<__nv_bfloat16, __nv_fp8_e4m3, false, true, float, true, false>
        void tensorrt_llm::kernels::quantize_with_block_size<(BlockScaleQuantizationType)0, __nv_bfloat16, 16, false>
        void vllm::cvt_fp16_to_fp4<__nv_bfloat16, false>(int, int)
        triton_poi_fused_mul_silu_slice_3
        triton_poi_fused__to_copy_add_transpose_view_7
        void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>>
        _swiglu_fwd_kernel
        void tensorrt_llm::kernels::cutlass_kernels::doActivationKernel<__nv_bfloat16, __nv_bfloat16>
        void aiter::kn_entry_2c_sbhd_cached_indirect_inplace<OpCachedFwd, 0, true, false, true>
        void transformer_engine::(anonymous namespace)::cast_transpose_optimized_kernel<true, false>
        fast_hadamard_transform_kernel<32, 7, __nv_bfloat16>
    """,
    "cache": """
        void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16, (vllm::Fp8KVCacheDataType)0>
        void vllm::concat_and_cache_mla_kernel<__nv_bfloat16, unsigned char, (vllm::Fp8KVCacheDataType)1>
        set_mla_kv_buffer_kernel
        create_flashinfer_kv_indices_triton
        write_req_to_token_pool_triton
        _compute_slot_mapping_kernel
        alloc_extend_kernel
        _zero_kv_blocks_kernel
        void (anonymous namespace)::store_kvcache<128l, 2, 1, false, long>
        void aiter::fuse_qk_rope_concat_and_cache_mla_per_head_kernel<__hip_bfloat16>
        fused_qk_rope_cat_and_cache_mla_kernel
        _set_k_and_s_triton_kernel
    """,
    "reduction": """
        triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0
        void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::func_wrapper_t<float>>>
        void at_cuda_detail::cub::DeviceScanKernel<at_cuda_detail::cub::AgentScanPolicy<128, 15>>
        void at::native::tensor_kernel_scan_innermost_dim<float, std::plus<float>>
    """,
    "layout": """
        triton_poi_fused_cat_clone_transpose_4
        triton_poi_fused_clone_view_3.kd
        void at::native::(anonymous namespace)::CatArrayBatchedCopy_contig<OpaqueType<2u>, unsigned int, 3, 64, 64>
        void at::native::elementwise_kernel<128, 4, gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda>>
        batched_transpose_32x32_dword
        void at::native::(anonymous namespace)::split_with_sizes_copy_out_contiguous_no_cast_kernel<true>
        void at::native::(anonymous namespace)::chunk_cat_cuda_kernel<float, c10::BFloat16>
        SubTensorOpWithTransform1d
    """,
    "optimizer": """
        void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, Adam>
    """,
    "embedding": """
        void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, long, unsigned int, 2, 2, -2, true>
        void at::native::(anonymous namespace)::embedding_backward_feature_kernel<c10::BFloat16, float, long>
    """,
    "sampling": """
        void flashinfer::sampling::TopKTopPSamplingFromProbKernel<1024u, (cub::BlockScanAlgorithm)1, float, int>
        void at::native::mbtopk::radixFindKthValues<float, unsigned int, unsigned int, 4>
        void apply_token_bitmask_inplace_kernel<__nv_bfloat16>
        _penalties_and_temperature_kernel
        void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>, unsigned int>>
        void flashinfer::sampling::OnlineSoftmaxFusedKernel<1024u, 4u, float>
        _temperature_kernel
        _min_p_kernel
    """,
}
KERNELS["recurrence"] = """
        _causal_conv1d_update_kernel
        void causal_conv1d_fwd_kernel<Causal_conv1d_fwd_kernel_traits<128, 4, true, c10::BFloat16, c10::BFloat16>>
        chunk_gated_delta_rule_fwd_kernel_h_blockdim64
        _chunk_state_fwd_kernel
        _chunk_cumsum_fwd_kernel
        fused_sigmoid_gating_delta_rule_update_kernel
        _selective_scan_update_kernel
    """
#: Kind -> kernels of communication.
COLLECTIVES = {
    "all-reduce": """
        ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)
        ncclSymkDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_bf16(ncclSymkDevWorkArgs4K)
        void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<(AllReduceFusionPattern)1>
        void tensorrt_llm::kernels::ar_fusion::moefinalize_allreduce_fusion_kernel_oneshot_lamport<2, __nv_bfloat16>
        void flashinfer::trtllm_mnnvl_allreduce::twoshotAllreduceKernel<(unsigned char)8, __nv_bfloat16>
        void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)
        void sglang::cross_device_reduce_2stage<__nv_bfloat16, 8>(sglang::RankData*)
        void aiter::cross_device_reduce_2stage_naive<__hip_bfloat16, 8>(aiter::RankData*)
        void quickreduce::allreduce_prototype_twoshot<AllReduceTwoshot<__hip_bfloat16, CodecQ4>>
        void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>
        void (anonymous namespace)::two_shot_all_reduce_kernel_inplace<c10::BFloat16, 16, 8>
        _ZN5aiter26cross_device_reduce_2stageI14__hip_bfloat16Li8EEEvPNS_8RankDataE
    """,
    "all-gather": """
        ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)
        void userbuffers_fp16_sum_inplace_gpu_rw_allgather<8>(int, int, int)
    """,
    "reduce-scatter": """
        ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)
        void aiter::reduce_scatter_cross_device_store<__hip_bfloat16, 8>
    """,
    "send-recv": """
        ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)
    """,
    "all-to-all": """
        void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*, int*, long*)
        void deep_ep::internode_ll::combine<true, 7168, 9, 16>(void*, void*)
        void tensorrt_llm::kernels::mnnvl_throughput::moeA2ADispatchKernel<TopK8>
        void mori::moe::EpDispatchIntraNodeKernel<hip_bfloat16>
        EpCombineIntraNodeKernel_bf16
    """,
    "collective": """
        ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)
        ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)
        rccl_main_kernel
        void mscclKernel_Sum_hip_bfloat16_LL_false(ncclDevComm*, mscclAlgo*, mscclWork*)
    """,
}


#: Operation of a framework that launched a kernel, the kernel, its category.
LAUNCHED = (
    ("_C::rotary_embedding", "void vllm::rotary_embedding_kernel<c10::BFloat16, true>", "elementwise"),
    ("_moe_C::topk_softmax", "void vllm::moe::topkGatingSoftmax<8, 128, 4, 16, 32, int>", "routing"),
    ("sgl_kernel::topk_softmax", "void topkGatingSoftmax<8, 128, 4, 16, 32, int>", "routing"),
    ("_C::fused_add_rms_norm", "void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>", "normalization"),
    ("vllm::unified_attention_with_output", "kernel_unified_attention_2d", "attention"),
    ("vllm::unified_attention_with_output", "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>", "cache"),
    (
        "sgl_kernel::fwd",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90>>",
        "attention",
    ),
    ("_C::cutlass_scaled_mm", "void cutlass::device_kernel<vllm::enable_sm100f_only<vllm::GemmUniversal>>", "matmul"),
    ("sgl_kernel::fp8_scaled_mm", "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal>", "matmul"),
    ("aten::_foreach_copy_", "void at::native::multi_tensor_apply_kernel<TensorListMetadata<2>>", "layout"),
    ("aten::_fused_adamw_", "void at::native::multi_tensor_apply_kernel<TensorListMetadata<4>>", "optimizer"),
    ("aten::_softmax", "void softmax_warp_forward<c10::BFloat16, c10::BFloat16, float, 10, false>", "softmax"),
)


def named(table):
    return [(kind, line.strip()) for kind, lines in table.items() for line in lines.strip().splitlines()]


@each("category, kernel", named(KERNELS))
def test_what_a_kernel_computes(category, kernel):
    assert kernel_activity(kernel, "kernel") == Activity.COMPUTE
    assert kernel_category(kernel) == category


@pytest.mark.parametrize(("parent", "kernel", "category"), LAUNCHED)
def test_what_was_launched(parent, kernel, category):
    assert kernel_category(kernel, parent) == category


@each("kind, kernel", named(COLLECTIVES))
def test_what_a_kernel_sends(kind, kernel):
    assert kernel_activity(kernel, "kernel") == Activity.COLLECTIVE
    assert collective_kind(kernel) == kind


@pytest.mark.parametrize(
    ("length", "said"), [(30, "the kind of operations that take 3.0% of busy time: mystery"), (5, "")]
)
def test_unknown_kernels_are_said_with_their_share(length, said):
    """A name that tells nothing is no guess, and is listed once it takes 1 % of the time."""
    ops = tuple(
        OpKind(name, Activity.COMPUTE, kernel_category(name)) for name in ("gemm_kernel", "void ns::mystery<int>(int)")
    )
    stream = StreamBuilder("0")
    stream.add(0, 1000 - length, 0)
    stream.add(1000 - length, length, 1)
    device = Device("GPU 0", "", 0, "", (stream.build(),))
    found = profile_traces([Trace("t", "kineto", ops, (device,), (Marker("step 0", 0, 1000, 0),))])
    assert [line for line in found.missing if "kind of operations" in line] == ([said] if said else [])


@pytest.mark.parametrize(
    ("megabytes", "bound", "share"), [(3.35, "memory", 0.5), (6.7, "memory", 1.0), (67, None, None)]
)
def test_bytes_that_memory_could_not_have_moved_count_as_unknown(megabytes, bound, share):
    """An H100 moves 3.35 MB in a microsecond: who is told to read 67 MB in 2 us reads some pages of a pool."""
    op = OpKind("attend_pages", Activity.COMPUTE, "custom", num_bytes=megabytes * 1e6)
    found = roofline_of(OpTime(op, runs=1, seconds=2e-6, exposed=2e-6, longest=2e-6), load_chip("h100-sxm"))
    assert (found and found.bound) == bound
    assert (found and found.share) == (share and pytest.approx(share, rel=0.01))
