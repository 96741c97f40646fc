"""How small the zoo's models are: what a field of a config shrinks to, and what that does not tell of a type."""

from typing import Any

LENGTH, WINDOW, VOCAB, LAYERS, HEADS, HIDDEN = 48, 8, 128, 4, 4, 64
NATIVE, ORIGINAL = 64, 32
"""Native context in tokens; where a config names an original one as well, that is ORIGINAL."""

_NAMES: dict[int, str] = {
    VOCAB: "vocab_size vocab_size_per_layer_input pronunciation_vocab_size shape_vocab_size",
    HIDDEN: "hidden_size d_model n_embd emb_dim embedding_dim word_embed_proj_dim lru_width embedding_size "
    "input_embedding_size output_embedding_size hidden_size_global encoder_hash_byte_group_vocab embed_dim "
    "out_hidden_size",
    96: "intermediate_size ffn_dim ffn_hidden_size dim_ff dff d_inner encoder_ffn_dim decoder_ffn_dim "
    "feed_forward_size dense_intermediate_size mlp_dim alignment_intermediate_size",
    32: "head_dim attention_head_dim dim_head d_head kv_channels mamba_d_head mamba_head_dim mamba_headdim "
    "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size intermediate_size_mlp "
    "shared_intermediate_size moe_shared_expert_intermediate_size",
    28: "image_size",
    24: "qk_head_dim query_pre_attn_scalar",
    16: "attention_head_size qk_nope_head_dim v_head_dim kv_lora_rank q_lora_rank o_lora_rank linear_head_dim "
    "linear_key_head_dim linear_value_head_dim mamba_chunk_size chunk_size hidden_size_per_layer_input laurel_rank "
    "adapter_rank router_hidden_size index_head_dim swa_head_dim hc_lowrank pronunciation_embed_dim "
    "shape_embed_dim",
    14: "patch_size",
    3: "num_channels",
    2: "num_experts_per_tok num_experts_per_token moe_topk moe_k index_n_heads num_layers_per_stack",
    1: "n_shared_experts num_shared_experts moe_num_shared_experts zero_expert_num n_group topk_group "
    "num_expert_group first_k_dense_replace num_dense_layers mamba_dt_rank time_step_rank mamba_ngroups "
    "mamba_n_groups n_groups depth pad_token_id bos_token_id eos_token_id",
}
_BY_MEANING: tuple[tuple[int, str], ...] = (
    (HEADS, "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads"),
    (HEADS, "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads linear_num_heads"),
    (HEADS, "linear_num_key_heads linear_num_value_heads mamba_n_heads mamba_num_heads"),
    (HEADS, "num_experts n_routed_experts num_local_experts moe_num_experts"),
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers"),
    (LAYERS, "num_decoder_layers num_blocks"),
    (NATIVE, "max_position_embeddings n_positions n_ctx max_seq_len context_length model_max_length"),
    (NATIVE, "max_target_positions max_source_positions original_max_position_embeddings"),
    (WINDOW, "sliding_window sliding_window_size window_size attention_window_size attention_chunk_size"),
    (WINDOW, "local_attention index_block_size mamba_d_state state_size ssm_state_size qk_rope_head_dim"),
)
SIZES = {name: size for size, names in (*_NAMES.items(), *_BY_MEANING) for name in names.split()}
"""What a field of a config shrinks to, where its default is a larger number."""

ALTERNATING = ["sliding_attention", "full_attention"] * 2
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_SECTIONS = {"rope_parameters": _ROPE | {"mrope_section": [4, 2, 2]}}
_EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}
_QUIET = {"attention_multiplier": 0.2}
"""Granite's default of 1 would leave every weight on one key."""

OVERRIDES: dict[str, dict[str, Any]] = {
    "aria_text": {"moe_num_experts": 4},
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt_global_transformer": {"head_dim": 16},
    "blt_local_decoder": {"head_dim": 16},
    "blt_local_encoder": {"head_dim": 16},
    "blt_patcher": {"head_dim": 16},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {
        "layer_types": ALTERNATING,
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE | {"rope_theta": 500.0}},
    },
    "dbrx": {
        "attn_config": {"rope_theta": 10_000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2},
    "dots1": _EXPERTS | {"layer_types": ALTERNATING},
    "dots3_note_text": {
        "shared_experts_intermediate_size": 32,
        "swa_num_attention_heads": HEADS,
        "swa_num_key_value_heads": HEADS,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 32,
        "swa_qk_nope_head_dim": 24,
        "swa_v_head_dim": 16,
    },
    "falcon_h1": {"mamba_d_ssm": 32},
    "gemma3n_text": {
        "layer_types": ALTERNATING,
        "num_kv_shared_layers": 2,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
    },
    "gemma4_text": {"global_head_dim": 48},
    "gemma4_unified_text": {"global_head_dim": 48},
    "gptj": {"rotary_dim": 8},
    "granite": _QUIET,
    "granite_swa": _QUIET,
    "granitemoe": _QUIET,
    "granitemoe_swa": _QUIET,
    "granitemoehybrid": _QUIET | {"layer_types": ["linear_attention", "full_attention"] * 2},
    "granitemoeshared": _QUIET,
    "helium": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1, 3],
        "layer_types": ["conv", "full_attention"] * 2,
        "num_hidden_layers": 4,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {
        "num_hidden_layers": 4,
        "moe_layers": [1, 3],
        "no_rope_layers": [1, 1, 1, 0],
        "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
    },
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "index_head_dim": 32},
    "ministral": {"head_dim": 16, "layer_types": ALTERNATING},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "ngram_vocab_size_base": 64,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 512,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"axial_pos_embds": False},
    "glm4v_text": _SECTIONS,
    "qwen2_5_vl_text": _SECTIONS,
    "qwen2_vl_text": _SECTIONS,
    "xlnet": {"d_head": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"n_mamba_heads": 4},
}
"""By type, what the rules do not tell. Of a composite config, its text part is of a type of its own."""

STARTS: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}}
}
"""What the default of a type needs to be a valid config."""
