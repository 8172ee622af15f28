"""Refuses Hugging Face configs whose layers are not plain softmax attention, by field and by model type.

A field is refused if its name speaks of attention, kinds of layers or state, unless it is listed here as one that
planning reads or may leave aside, or its value switches it off. Model types whose classes of transformers 5.23 do
something else without a field that says so are listed by type.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from apportion.ir.errors import ConfigError


def words(text: str) -> frozenset[str]:
    """The words of a table."""
    return frozenset(text.split())


#: Types without a causal mask, where `is_decoder` does not switch it on.
ENCODERS = words(
    """albert bert bert-generation big_bird camembert data2vec-text electra ernie esm eurobert ibert megatron-bert
    modernbert mpnet nomic_bert rembert roberta roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl
    xmod"""
)
_REASONS: Mapping[str, str] = MappingProxyType(  # reason -> fields that tell, the most telling first
    {
        "has layers of linear attention or of a recurrent state": """full_attention_interval linear_attn_config
            hybrid_override_pattern attn_type_list layers_block_type block_types attn_layer_period attn_layer_indices
            mamba_d_state ssm_state_size state_size linear_conv_kernel_dim conv_L_cache""",
        "chooses the keys of a query as it runs": "index_topk index_topk_blocks keep_window_size sparse_config",
        "shares keys and values between layers": "num_kv_shared_layers use_cla",
        "runs several streams of hidden states beside one another (AltUp)": "altup_num_inputs",
        "has other heads in some layers": """global_head_dim num_attention_heads_per_layer block_configs
            swa_num_attention_heads swa_num_key_value_heads swa_head_dim per_layer_config""",
        "has layers that attend to another sequence": """is_encoder_decoder add_cross_attention
            cross_attention_layers""",
        "sees a prefix from both sides": "prefix_lm",
        "computes differences of two softmaxes": "lambda_std_dev",
    }
)
_TYPES: Mapping[str, str] = MappingProxyType(  # reason -> types whose class does so, said or not
    {
        "has layers of linear attention or of a recurrent state": """bailing_hybrid bamba falcon_h1 falcon_mamba
            granitemoehybrid jamba kimi_linear lfm2 lfm2_moe lfm3 mamba mamba2 minimax minimax_m1 nemotron_h olmo_hybrid
            qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp_text recurrent_gemma rwkv xlstm zamba zamba2 zaya""",
        "chooses the keys of a query as it runs": """axk2 deepseek_v32 deepseek_v4 doge dots3_note_text glm_moe_dsa
            hy_v4 minimax_m3_vl_text reformer""",
        "has other heads in some layers": """gemma4_text gemma4_unified_text inkling2_text inkling_text laguna
            mimo_v2_flash""",
        "shares keys and values between layers": "gemma3n_text gemma4_assistant gemma4_unified_assistant",
        "has layers that attend to another sequence": """bart bigbird_pegasus blenderbot blenderbot-small blt git marian
            mbart mllama mllama_text_model musicgen musicgen_decoder musicgen_melody musicgen_melody_decoder mvp pegasus
            plbart prophetnet t5 t5gemma t5gemma2 trocr whisper""",
        "sees a prefix from both sides": "cpmant hrm_text xlm xlnet",
        "computes differences of two softmaxes": "diffllama",
        "has experts in its attention, or two attentions a layer": "jetmoe longcat_flash",
    }
)
_SPEAKS = re.compile(
    "attn|attention|layers?_type|mixer|ssm|mamba|conv|linear|recurr|lru|rwkv|retention|window|chunk|slid|swa_|local|global"
    "|hybrid|pattern|_period|interval|index_|indexer|sparse|state|share|sharing|cross|encoder|causal|prefix|compress"
    "|lightning|delta|kda|mask|alibi|head|per_layer|stride|memory|mem_|lsh|cycle|block|layer_group|sink|directional"
    "|every_n|_idxs|layer_ids"
)
#: Fields that only say in which layers a window is; idle beside `layer_types`.
PATTERNS = words(
    """_sliding_window_pattern attention_types full_attn_idxs global_attn_every_n_layers local_layer_ids
    prefix_dense_sliding_window_pattern sliding_window_pattern"""
)
_UNDERSTOOD = words(  # read, or without a say in which pairs of tokens there are and how wide heads are
    """attention_chunk_size attention_head_dim attention_heads attention_layers attn_config head_dim is_causal
    is_decoder kv_n_heads layer_types local_attention max_window_layers n_head n_heads no_rope_layer_interval
    num_attention_heads num_heads num_key_value_heads num_kv_heads qk_head_dim qk_nope_head_dim qk_rope_head_dim
    sliding_window use_bidirectional_attention use_sliding_window v_head_dim window_size

    _attn_implementation _attn_implementation_internal alibi alibi_bias_max attention_bias attention_dropout
    attention_multiplier attention_out_bias attention_probs_dropout_prob attention_softmax_in_fp32 attn_dropout
    attn_impl attn_implementation attn_logit_softcapping attn_pdrop attn_scale attn_temperature_tuning
    cla_share_factor deterministic_flash_attn global_rope_theta lm_head_bias lm_head_multiplier local_rope_theta
    mask_token_id masked_softmax_fusion mtp_hidden_states_first mtp_layer_types mtp_local_layer_ids
    mtp_mlp_layer_types num_ln_in_parallel_attn offset_alibi output_attentions output_hidden_states
    parallel_attn prefix query_pre_attn_scalar reorder_and_upcast_attn rope_local_base_freq
    scale_attention_softmax_in_fp32 scale_attn_by_inverse_layer_idx scale_attn_weights sparse_pred_ignore_index
    sparse_prediction use_embedding_sharing use_parallel_block

    decoder_sparse_step interleave_moe_layer_step mlp_layer_types moe_layer_interval moe_num_shared_experts
    n_shared_experts num_local_experts num_shared_experts shared_expert_combination_strategy
    shared_expert_intermediate_size shared_experts_intermediate_size shared_intermediate_size"""
)
_NEUTRAL = MappingProxyType(
    {
        "attention_type": ("original_full",),
        "attn_type": ("multihead_attention",),
        "attn_type_list": (1,),  # of MiniMax: 0 is linear attention
    }
)
_REMEDY = "write a model file (q_heads, kv_heads, …) for the layers of softmax attention"


def check_layers(text: Mapping[str, Any], idle: Collection[str]) -> None:
    """Refuses a config with layers that are no plain softmax attention, or with a field about that which is not
    understood. idle: pattern fields that are read, or need not be. Raises ConfigError."""
    kind = text["model_type"]
    for reason, listed in _REASONS.items():
        for field in listed.split():
            if _is_on(field, text.get(field)):
                raise ConfigError(field, text[field], f"a model of type {kind} {reason}", _REMEDY)
    for reason, listed in _TYPES.items():
        if not {kind, f"{kind}_text"}.isdisjoint(listed.split()):
            raise ConfigError("model_type", kind, f"a model of this type {reason}", _REMEDY)
    for field, value in text.items():
        understood = field in _UNDERSTOOD or field in idle or not _SPEAKS.search(field.lower())
        if not understood and _is_on(field, value):
            rule = f"not understood of a model of type {kind}: it may change what its layers attend to"
            raise ConfigError(field, value, rule, _REMEDY)


def _is_on(field: str, value: Any) -> bool:
    off = _NEUTRAL.get(field, ())
    if isinstance(value, list | tuple):
        return any(item not in off for item in value)
    return bool(value) and value not in off
