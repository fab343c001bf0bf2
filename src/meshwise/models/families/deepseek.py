"""Latent and compressed attention, and indexers that choose keys: DeepSeek-V2 to V4, Kimi K2, GLM-5, MiniMax-M3.

Routing corrections of V4 and MiniMax-M3, and the tables by which V4's first layers route tokens, are no parameters in
the reference implementations, and not counted. Not here: what the layers are made of.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwise.core.errors import ConfigError
from meshwise.models.families.dense import BY_HEAD, DECODER, MINICPM
from meshwise.models.families.features import (
    Experts,
    Family,
    Numbers,
    family,
    ffn,
    heads,
    mixture,
    mlp,
    modules_note,
    one_of_layers,
    uncounted_modules,
)
from meshwise.models.families.keys import (
    INTEGER,
    OFF,
    POSITIONS,
    SIZE,
    Held,
    Inside,
    Keys,
    Listed,
    Only,
    divide,
    only,
    schema,
)
from meshwise.models.families.mixtures import LEADING_DENSE, LEADING_DENSE_KEYS, mtp_extras
from meshwise.models.spec import (
    Compressed,
    Embedding,
    Indexer,
    LatentAttention,
    Layer,
    Mixture,
    Mlp,
    Router,
    SelfAttention,
    Streams,
)


def _latent_attention(f: Family, k: Keys, index: int) -> LatentAttention:
    """Over all keys, or over those that an indexer chooses."""
    indexer = None
    if "index_topk" in k:
        if k.q_lora_rank is None:
            raise ConfigError(
                "key 'q_lora_rank': expected a whole number, as the indexer reads that latent; found null"
            )
        indexer = Indexer(k.index_n_heads, k.index_head_dim, k.index_topk)
    return LatentAttention(
        heads=k.num_attention_heads,
        q_rank=k.q_lora_rank,
        kv_rank=k.kv_lora_rank,
        nope_dim=k.qk_nope_head_dim,
        rope_dim=k.qk_rope_head_dim,
        v_dim=k.v_head_dim or divide(k.hidden_size, k.num_attention_heads, "hidden_size", "num_attention_heads"),
        bias=bool(k.attention_bias),
        indexer=indexer,
    )


DEEPSEEK_V2 = family(
    "deepseek_v2", "DeepseekV2ForCausalLM", DECODER, {
        **LEADING_DENSE_KEYS, "intermediate_size": 11008, "max_position_embeddings": 2048, "attention_bias": False,
        "mlp_bias": OFF, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "moe_intermediate_size": 1407, "n_routed_experts": 64, "n_shared_experts": 2,
        "first_k_dense_replace": 0,
    }, ignored="qk_head_dim", attention=_latent_attention, extras=mtp_extras,
    experts=replace(LEADING_DENSE, router=Router("softmax", normalised=False), options={}),
)  # fmt: skip
DEEPSEEK_V3 = family(
    "deepseek_v3 kimi_k2", "DeepseekV3ForCausalLM KimiK2ForCausalLM", DEEPSEEK_V2, {
        "intermediate_size": 18432, "max_position_embeddings": 4096, "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8, "n_routed_experts": 256, "n_shared_experts": 1, "first_k_dense_replace": 3,
        "n_group": 8, "topk_group": 4,
    }, experts=replace(LEADING_DENSE, router=Router("sigmoid", scale=2.5)), numbers=Numbers(style="deepseek_v3"),
)  # fmt: skip


def _listed_ffn(f: Family, k: Keys, index: int) -> Mlp | Mixture:
    """As listed, else dense at first; modules beyond the layers are mixtures."""
    if k.mlp_layer_types is None or index >= k.num_hidden_layers:
        return ffn(replace(f, ffn=None), k, index)
    return mlp(f, k) if k.per_layer("mlp_layer_types")[index] == "dense" else mixture(f, k)


DEEPSEEK_V32 = family(
    "deepseek_v32", "DeepseekV32ForCausalLM", DEEPSEEK_V3, {
        "max_position_embeddings": 163840, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64,
        "layer_types": Held(Listed(Only(("indexed_attention",)))), "mlp_layer_types": None,
    }, ignored="qk_head_dim indexer_rope_interleave index_rope_interleave", ffn=_listed_ffn,
)  # fmt: skip
GLM_MOE_DSA = family(
    "glm_moe_dsa", "GlmMoeDsaForCausalLM", DEEPSEEK_V32, {
        "intermediate_size": 12288, "max_position_embeddings": 202752, "q_lora_rank": 2048, "qk_nope_head_dim": 192,
        "v_head_dim": 256, "index_n_heads": 32, "indexer_types": Held(Listed(Only(("full",)))),
        "index_topk_freq": only(1), "n_group": 1, "topk_group": 1,
    },
)  # fmt: skip
GLM4_MOE_LITE = family(
    "glm4_moe_lite", "Glm4MoeLiteForCausalLM", DEEPSEEK_V3, {
        "intermediate_size": 10240, "max_position_embeddings": 202752, "moe_intermediate_size": 1536,
        "num_experts_per_tok": 4, "n_routed_experts": 64, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "mlp_layer_types": None,
    }, ffn=_listed_ffn,
)  # fmt: skip
MINICPM3 = family(
    "minicpm3", "MiniCPM3ForCausalLM", DECODER, {
        "intermediate_size": 6400, "max_position_embeddings": 32768, "tie_word_embeddings": True,
        "attention_bias": False, "mlp_bias": OFF, "q_lora_rank": 768, "kv_lora_rank": 256, "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32, "v_head_dim": None,
    }, ignored=" ".join(MINICPM.ignored), attention=_latent_attention, scaled=True, head_scaled=True,
)  # fmt: skip

_SLIDING, _SPARSE, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_BY_RATIO = {0: _SLIDING, 4: _SPARSE, 128: _HEAVY}
#: Positions that one key stands for.
COMPRESS_RATES = schema({}, {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}, {})


def _v4_kind(k: Keys, index: int) -> str:
    """What a layer attends to: as listed, by its ratio, or heavily compressed at first and then by turns."""
    for key in ("layer_types", "compress_ratios"):
        listed = getattr(k, key)
        if listed is not None:
            if len(listed) < k.num_hidden_layers:  # multi-token-prediction modules may follow
                raise ConfigError(
                    f"key {key!r}: expected one entry a layer ({k.num_hidden_layers}), found {len(listed)}"
                )
            return _BY_RATIO.get(listed[index]) or str(listed[index])
    return _SPARSE if index >= 2 and index % 2 else _HEAVY


def _v4_ratio(k: Keys, kind: str) -> int:
    """How many positions one key stands for."""
    rates = k.compress_rates
    if kind == _SPARSE:
        return int(k.compress_rate_csa or (rates.compressed_sparse_attention if rates else 4))
    return int(k.compress_rate_hca or (rates.heavily_compressed_attention if rates else 128)) if kind == _HEAVY else 0


def _v4_layer(f: Family, k: Keys, index: int) -> Layer:
    """Attention and a mixture, between streams; layers that route by a table weigh by the router, too."""
    kind, hidden = _v4_kind(k, index), k.moe_intermediate_size
    divide(k.num_attention_heads, k.o_groups, "num_attention_heads", "o_groups")
    if k.intermediate_size not in (None, hidden):
        raise ConfigError(
            f"key 'intermediate_size': expected that of moe_intermediate_size ({hidden}), as no layer is dense; "
            f"found {k.intermediate_size}"
        )
    mixer = Compressed(
        heads=k.num_attention_heads,
        head_dim=k.head_dim or k.hidden_size // k.num_attention_heads,
        q_rank=k.q_lora_rank,
        groups=k.o_groups,
        group_rank=k.o_lora_rank,
        window=k.sliding_window,
        ratio=_v4_ratio(k, kind),
        overlap=kind == _SPARSE,
        indexer=Indexer(k.index_n_heads, k.index_head_dim, k.index_topk) if kind == _SPARSE else None,
    )
    return Layer(mixer, mixture(f, k), streams=Streams(k.hc_mult, k.hc_sinkhorn_iters))


def _uncounted_modules(f: Family, k: Keys) -> dict[str, Any]:
    modules = k.num_nextn_predict_layers
    return {"notes": (modules_note(modules, "not counted"),)} if modules else {}


DEEPSEEK_V4 = family(
    "deepseek_v4", "DeepseekV4ForCausalLM", DECODER, {
        "num_key_value_heads": Held(Only((1,)), 1, null=True), "head_dim": 512, "max_position_embeddings": 1048576,
        "attention_bias": Held(Only((False,)), False, null=True), "mlp_bias": Held(Only((False,)), False, null=True),
        "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": only(1, default=1),
        "num_experts_per_tok": 6, "q_lora_rank": Held(SIZE, 1024), "o_lora_rank": 1024, "o_groups": 8,
        "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "sliding_window": Held(POSITIONS, 128),
        "hc_mult": 4, "hc_sinkhorn_iters": 20, "compress_ratios": Held(Listed(Only((0, 4, 128)))),
        "compress_rates": Held(Inside(COMPRESS_RATES, closed=False)), "compress_rate_csa": None,
        "compress_rate_hca": None, "layer_types": Held(Listed(Only((_SLIDING, _SPARSE, _HEAVY)))),
        "mlp_layer_types": Held(Listed(Only(("hash_moe", "moe")))), "num_hash_layers": None, "expert_dtype": None,
        "num_nextn_predict_layers": 1,
    }, ignored="hc_eps swiglu_limit compress_rope_theta qk_rope_head_dim",
    layer=_v4_layer, extras=_uncounted_modules, embedding=lambda k: Embedding(streams=k.hc_mult),
    head=lambda k, usual: replace(usual, streams=k.hc_mult),
    experts=Experts(
        "n_routed_experts", hidden="moe_intermediate_size", shared="moe_intermediate_size",
        router=Router("sqrtsoftplus", scale=1.5),
    ),
)  # fmt: skip

SPARSE_ATTENTION = schema({}, {
    "use_sparse_attention": True, "sparse_index_dim": 128, "sparse_num_index_heads": 4, "sparse_topk_blocks": 16,
    "sparse_block_size": 128, "sparse_disable_index_value": Held(Listed(INTEGER)), "sparse_score_type": None,
    "sparse_init_block": Held(INTEGER, 0), "sparse_local_block": Held(INTEGER, 1), "sparse_attention_freq": None,
}, {})  # fmt: skip


def _m3_indexer(k: Keys, index: int) -> Indexer | None:
    """What chooses blocks for a layer, by either way to say it."""
    sparse = k.sparse_attention_config
    if k.layer_types is not None:
        chosen = k.per_layer("layer_types")[index] == "minimax_m3_sparse"
    else:
        pattern = sparse.sparse_attention_freq if sparse is not None and sparse.use_sparse_attention else None
        chosen = bool(pattern) and bool(k.per_layer("sparse_attention_config.sparse_attention_freq", pattern)[index])
    if not chosen:
        return None
    if sparse is not None:
        positions = sparse.sparse_topk_blocks * sparse.sparse_block_size
        return Indexer(sparse.sparse_num_index_heads, sparse.sparse_index_dim, positions)
    return Indexer(k.index_n_heads, k.index_head_dim, k.index_topk_blocks * k.index_block_size)


def _m3_attention(f: Family, k: Keys, index: int) -> SelfAttention:
    """Over the blocks that the indexer chooses, in sparse layers."""
    return SelfAttention(*heads(f, k), qk_norm=f.qk_norm, indexer=_m3_indexer(k, index))


MINIMAX_M3 = family(
    "minimax_m3_vl_text", "MiniMaxM3SparseForCausalLM MiniMaxM3VLForCausalLM", DECODER, {
        "intermediate_size": 3072, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 524288,
        "dense_intermediate_size": 12288, "shared_intermediate_size": 3072, "n_shared_experts": only(1, default=1),
        "num_experts_per_tok": 4, "num_local_experts": 128, "use_qk_norm": only(True, default=True),
        "qk_norm_type": only("per_head", default="per_head"), "attention_output_gate": OFF, "moe_layer_freq": None,
        "mlp_layer_types": None, "layer_types": Held(Listed(Only(("full_attention", "minimax_m3_sparse")))),
        "index_n_heads": 4, "index_head_dim": 128, "index_topk_blocks": 16, "index_block_size": 128,
        "sparse_attention_config": Held(Inside(SPARSE_ATTENTION, closed=False)), "num_mtp_modules": 0,
    }, ignored="swiglu_alpha swiglu_limit use_routing_bias use_gemma_norm index_local_blocks",
    hidden="dense_intermediate_size",
    qk_norm=BY_HEAD, attention=_m3_attention, extras=uncounted_modules("num_mtp_modules"),
    experts=Experts(
        shared="shared_intermediate_size", router=Router("sigmoid"),
        layers=lambda k, index: one_of_layers(k, index, otherwise=True),
    ),
)  # fmt: skip
