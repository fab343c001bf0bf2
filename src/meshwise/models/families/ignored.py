"""Keys that change nothing that is counted, names of activations, and families that are not supported yet.

A key is ignored only when no value of it changes a shape, an operation, or which positions are attended to.
"""

from __future__ import annotations

import difflib
import re

from meshwise.core.errors import ConfigError

_TOKENS = """
bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id
decoder_start_token_id forced_bos_token_id forced_eos_token_id bos_token eos_token pad_token unk_token prefix
suppress_tokens begin_suppress_tokens bad_words_ids tokenizer_class im_start_token_id im_end_token_id
padding_idx
"""

_TRAINING = """
initializer_range initializer_factor init_std init_method init_cutoff_factor attention_dropout hidden_dropout
attention_probs_dropout_prob hidden_dropout_prob activation_dropout classifier_dropout classifier_dropout_prob
dropout attn_pdrop embd_pdrop emb_pdrop resid_pdrop residual_dropout embedding_dropout attention_dropout_prob
layerdrop embd_layer_norm_pdrop router_aux_loss_coef router_z_loss_coef router_jitter_noise input_jitter_noise
output_router_logits aux_loss_alpha seq_aux gradient_checkpointing use_gradient_checkpointing moe_jitter_eps
moe_loss_weight router_dropout moe_dropout_prob aux_loss_factor z_loss_factor summary_activation
summary_first_dropout summary_proj_to_labels summary_type summary_use_proj router_init_std
scale_embedding_at_init first_stage_training
"""

_BOOKKEEPING = """
_name_or_path is_llama_config is_composition num_image_tokens type_vocab_size n_special
predict_special_tokens _from_model_config
transformers.js_config max_sequence_length eod_token_id name_or_path transformers_version _commit_hash auto_map
use_cache return_dict output_attentions output_hidden_states torchscript use_bfloat16 is_decoder
tie_encoder_decoder chunk_size_feed_forward problem_type id2label label2id num_labels finetuning_task
task_specific_params model_name model_name_or_path max_length min_length do_sample early_stopping num_beams
num_beam_groups diversity_penalty temperature top_p typical_p repetition_penalty length_penalty
no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences output_scores return_dict_in_generate
remove_invalid_values exponential_decay_length_penalty tf_legacy_loss cache_implementation onnx_export
unsloth_version unsloth_fixed keys_to_ignore_at_inference output_past pretraining_tp ep_size base_model_tp_plan
base_model_pp_plan _attn_implementation _attn_implementation_autoset attn_implementation
_attn_implementation_internal use_flash_attn use_flash_attention use_flash_attention_2 flash_attn_version
fused_bias_fc use_flash_rotary flash_attn flash_rotary fused_dense fused_mlp masked_softmax_fusion
bias_dropout_fusion attention_softmax_in_fp32 scale_attention_softmax_in_fp32 softmax_in_fp32 scale_attn_weights
scale_attn_by_inverse_layer_idx reorder_and_upcast_attn use_custom_kernels seq_length context_window_size
prefill_chunk_size tensor_parallel_shards max_batch_size skip_bias_add skip_bias_add_qkv quantization
quantization_bit model_max_length neuron use_fast_kernels kv_cache_scheme
"""

#: Keys that change what is computed, though no count: `numerics` reads them where a model is executed.
NUMERICS = """
rms_norm_eps layer_norm_eps layer_norm_epsilon
norm_eps norm_epsilon layernorm_epsilon rope_theta rope_theta_base rotary_emb_base rotary_base rotary_pct
rotary_percent rotary_emb_fraction rotary_emb_interleaved partial_rotary_factor rope_pct rotary_dim
rope_local_base_freq rope_interleaved rope_interleave rope_ratio rope_type original_max_position_embeddings
initial_context_length logit_scale query_pre_attn_scalar norm_topk_prob norm_top_k_prob scoring_func
routed_scaling_factor topk_method n_group topk_group
"""

#: Names of keys that no count depends on, of families that are not listed above: ids of tokens, dropout, losses, first
#: values, norms' epsilon, how pictures and sounds are prepared, seeds and versions.
_HARMLESS = re.compile(
    r"(\w+_)?(token(_id|_ids|_index|_indices)?|drop_?out(_\w+)?|drop_path_rate|drop_prob|pdrop|loss(_\w+)?|eps|epsilon|"
    r"init(ializer)?_(std|range|factor|scale|method|gain)|seed|version)"
    r"|image_(seq_length|mean|std)|(min|max)_pixels|(min|max)_frames|fps|resample|rescale_factor|sampling_rate"
    r"|(?!\w*(layer|expert|head|block|group))\w+_ids?"
)

#: Names of keys beside the model, whatever they hold: who wrote it, how it was trained, its tokenizer, what runs it.
_ASIDE = re.compile(
    r"(\w+_)?(comment|note)s?|description|authors?|licen[cs]e(_\w+)?|languages?|tags|citation|homepage|url|date|"
    r"created_(at|by)|git_\w+|trained_on|datasets?"
    r"|learning_rate|lr|weight_decay|warmup_\w+|((micro|global|train|eval)_)?batch_size|max_(steps|epochs|new_tokens)|"
    r"(num_)?(train_)?epochs|training_(args|data|steps|tokens)|optimizer|lr_scheduler(_\w+)?|deepspeed|wandb\w*|"
    r"framework|checkpoint(_path|_dir)?|fp16|bf16|log_level|verbose|debug"
    r"|(\w+_)?tokenizer(_\w+)?|vocab_(file|path)|merges_file|(padding|truncation)_side|chat_template|generation_config|"
    r"processor_class|image_processor_type|feature_extractor_type"
    r"|_?\w+_implementation|use_(sdpa|flash\w*|xformers)|(torch_)?compile|(init_)?device|device_map|world_size|mp_size"
)

IRRELEVANT = frozenset(f"{_TOKENS} {_TRAINING} {_BOOKKEEPING} {NUMERICS}".split())

#: Spellings of the key.
ACTIVATION_KEYS = frozenset(
    {"hidden_act", "hidden_activation", "activation_function", "activation_type", "activation", "act_fn"}
)

#: Functions without parameters of their own, by every spelling that is common.
ACTIVATIONS = (
    "gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh",
    "gelu_pytorch_tanh", "gelu_tanh", "leaky_relu", "linear", "mish", "quick_gelu", "relu", "relu2", "relu6",
    "relu_squared", "sigmoid", "silu", "squared_relu", "swish", "tanh",
)  # fmt: skip

#: Names of a gated layer's activation.
GATED_ACTIVATIONS = ("geglu", "reglu", "swiglu", "swigluoai")


def is_harmless(key: str, value: object) -> bool:
    """Whether no value of a key that is not known changes a count, by its name; a switch of tokens may.

    >>> is_harmless("image_seq_length", 576), is_harmless("use_cls_token", True), is_harmless("num_kv_groups", 2)
    (True, False, False)
    >>> is_harmless("video_end_id", 10), is_harmless("moe_layer_ids", [1, 3]), is_harmless("torch_compile", True)
    (True, False, True)
    """
    named = _HARMLESS.fullmatch(key) is not None and not (value is True or isinstance(value, dict))
    return named or _ASIDE.fullmatch(key) is not None


def check_activation(key: str, value: object, *, gated: bool) -> None:
    """Refuse an activation that is not known, or that would make gated what is not.

    Args:
        key: as the configuration spells it.
        value: what it says; null says nothing.
        gated: whether every feed-forward layer of the model is gated.

    Raises:
        ConfigError: names the activations that are known.
    """
    name = value.lower() if isinstance(value, str) else value
    known = (*ACTIVATIONS, *GATED_ACTIVATIONS) if gated else ACTIVATIONS
    if value is None or name in known:
        return
    if name in GATED_ACTIVATIONS:
        raise ConfigError(
            f"key {key!r}: {value!r} would make the feed-forward layers gated, and this model_type's are not; "
            f"expected one of {', '.join(known)}"
        )
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.75)
    hint = f" (nearest: {near[0]})" if near else ""
    raise ConfigError(f"key {key!r}: expected one of {', '.join(known)}; found {value!r:.60}{hint}")


#: `model_type` -> what is missing.
NOT_YET: dict[str, str] = {
    kind: why
    for kinds, why in (
        (
            "zamba zamba2 falcon_h1 plamo2 codestral_mamba",
            "what this family has around its state-space layers is not modelled",
        ),
        (
            "kimi_linear rwkv recurrent_gemma xlstm lfm2 lfm2_moe olmo_hybrid bailing_hybrid",
            "its kind of linear-attention or recurrent layers is not modelled",
        ),
        ("qwen2_5_omni qwen3_omni_moe", "a sound tower and a model that speaks are not modelled"),
        ("gemma3n gemma3n_text", "streams that are updated by turns (AltUp) are not modelled"),
        ("idefics idefics2 blip-2 instructblip", "resamplers behind a tower are not modelled"),
        ("chameleon emu3 janus", "tokenizers that turn pictures into tokens are not modelled"),
        (
            "pixtral phi4_multimodal phi3_v ernie4_5_vl_moe llava_onevision internvl_chat deepseek_vl_v2 molmo",
            "the tower of this family is not modelled",
        ),
        (
            "bert roberta distilbert deberta-v2 modernbert xlm-roberta clip siglip vit",
            "encoders without a decoder are not modelled",
        ),
        (
            "mbart pegasus marian longt5 switch_transformers t5gemma whisper m2m_100 led",
            "this encoder-decoder is not modelled",
        ),
        ("openelm", "layers whose heads differ in width are not modelled"),
        ("deci", "layers with key/value heads of their own number are not modelled"),
        ("arctic longcat_flash", "a dense feed-forward layer beside each mixture is not modelled"),
        ("grok-1 grok", "its mixture with norms on both sides is not modelled"),
        ("chatglm", "its keys are those of code of its own; files converted for transformers ('glm', 'glm4') are read"),
    )
    for kind in kinds.split()
}
