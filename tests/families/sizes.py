"""Sizes of tiny models: by the names that configs give them, and what some families need beyond."""

from __future__ import annotations

from typing import Any

ROWS, TOKENS, VOCABULARY, LABELS, IMAGE = 3, 7, 50, 3, 16
WIDTH, HEADS, HEAD = 32, 4, 8
FIRST_WORD = 20
"""Ids below are for special tokens: words of a batch are never one by accident."""


def _sizes(value: int, names: str) -> dict[str, int]:
    return dict.fromkeys(names.split(), value)


SIZES: dict[str, int] = {
    **_sizes(WIDTH, "hidden_size d_model n_embd emb_dim dim embed_dim embedding_size word_embed_proj_dim projection_dim"),
    **_sizes(WIDTH, "input_embedding_size output_embedding_size pooler_hidden_size pooler_output_size projection_size"),
    **_sizes(WIDTH, "cross_attention_hidden_size attention_hidden_size out_hidden_size lru_width d_latents hidden_size_global"),
    **_sizes(WIDTH, "adapter_in_dim adapter_input_size adapter_out_dim"),
    **_sizes(20, "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim hidden_dim d_ff d_inner n_inner dff ffn_hidden_size"),
    **_sizes(20, "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size shared_experts_intermediate_size"),
    **_sizes(20, "intermediate_size_mlp expert_ffn_hidden_size dense_intermediate_size"),
    **_sizes(2, "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_decoder_layers depth"),
    **_sizes(2, "encoder_num_hidden_layers decoder_num_hidden_layers num_encoder_layers num_blocks num_stages num_encoder_blocks"),
    **_sizes(2, "n_mamba_heads max_window_layers"),
    **_sizes(HEADS, "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads"),
    **_sizes(HEADS, "num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads index_n_heads"),
    **_sizes(HEADS, "num_self_attention_heads num_cross_attention_heads linear_num_value_heads linear_num_heads"),
    **_sizes(2, "num_kv_heads kv_n_heads swa_num_key_value_heads linear_num_key_heads num_global_key_value_heads"),
    **_sizes(HEAD, "head_dim d_kv d_head kv_channels v_head_dim qk_nope_head_dim qk_rope_head_dim index_head_dim attention_head_dim"),
    **_sizes(HEAD, "linear_key_head_dim linear_value_head_dim linear_head_dim swa_head_dim swa_v_head_dim global_head_dim"),
    **_sizes(2 * HEAD, "qk_head_dim"),
    **_sizes(12, "kv_lora_rank q_lora_rank o_lora_rank"),
    **_sizes(2, "num_experts n_routed_experts num_local_experts moe_num_experts num_experts_per_tok num_experts_per_token moe_topk"),
    **_sizes(2, "moe_k top_k_experts index_topk"),
    **_sizes(1, "n_shared_experts num_shared_experts moe_num_shared_experts topk_group n_group num_expert_group"),
    **_sizes(1, "first_k_dense_replace num_dense_layers moe_layer_start_index"),
    **_sizes(0, "num_nextn_predict_layers num_kv_shared_layers"),
    **_sizes(VOCABULARY, "vocab_size vocab_size_per_layer_input audio_vocab_size codebook_size entity_vocab_size"),
    **_sizes(32, "max_position_embeddings n_positions max_source_positions max_target_positions max_seq_len n_ctx model_max_length"),
    **_sizes(32, "max_sequence_length original_max_position_embeddings max_2d_position_embeddings"),
    **_sizes(4, "sliding_window window_size sliding_window_size local_attention attention_chunk_size"),
    **_sizes(IMAGE, "image_size input_size"),
    **_sizes(4, "patch_size"),
    **_sizes(8, "num_mel_bins state_size mamba_d_state hidden_size_per_layer_input laurel_rank mamba_d_head"),
    **_sizes(4, "rotary_dim chunk_size mamba_chunk_size time_step_rank mamba_dt_rank"),
    **_sizes(8, "mamba_n_heads pronunciation_embed_dim shape_embed_dim"),
    **_sizes(VOCABULARY, "unpadded_vocab_size pronunciation_vocab_size shape_vocab_size encoder_hash_byte_group_vocab"),
}
"""Size by the name of a config's attribute."""

RANGES = ("initializer_range", "init_std")
"""Set to 0.2: with the usual 0.02 a narrow model's attention is uniform and hides everything about queries and keys."""

GROUPED = frozenset(["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "granite", "cohere", "starcoder2", "olmo2"])
"""Families known for fewer keys than queries although their default config has as many."""

SPECIAL = {"pad": 0, "bos": 1, "cls": 1, "decoder_start": 1, "eos": 2, "sep": 2}
"""Ids of the tokens that every text family has; others follow in order of appearance."""

FILLED = frozenset({"head_dim", "num_experts_per_tok", "n_inner"})
"""Attributes that get their size even where the default config leaves them open."""

HALF_ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
SWIN = {"patch_size": 2, "window_size": 4, "embed_dim": 16, "depths": [2, 1]}
ZAMBA = {
    "num_hidden_layers": 3,
    "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    "attention_hidden_size": 2 * WIDTH,
    "attention_head_dim": 2 * HEAD,
}

CORRECTIONS: dict[str, dict[str, Any]] = {
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "bit": {"num_groups": 4},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "cvt": {"cls_token": [False, True]},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "donut-swin": SWIN,
    "dots1": {"n_routed_experts": 2, "n_shared_experts": 1},
    "efficientnet": {"image_size": 64, "width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 128},
    "esm": {"vocab_size": VOCABULARY},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma2": {"query_pre_attn_scalar": 12},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gpt_neox": {"rope_parameters": HALF_ROTARY, "rotary_pct": 0.5},  # the second for the oldest transformers
    "granite": {"attention_multiplier": 0.3, "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "hgnet_v2": {
        "stem_channels": [3, 8, 8],
        "stage_in_channels": [8, 16],
        "stage_mid_channels": [8, 8],
        "stage_out_channels": [16, 32],
        "stage_numb_of_layers": [2, 2],
    },
    "hiera": {
        "image_size": [32, 32],
        "patch_size": [7, 7],
        "patch_stride": [4, 4],
        "patch_padding": [3, 3],
        "embed_dim": 16,
        "query_stride": [2, 2],
        "num_query_pool": 1,
        "masked_unit_size": [4, 4],
    },
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4},
    "levit": {
        "image_size": 64,
        "patch_size": 16,
        "hidden_sizes": [16, 24, 32],
        "num_attention_heads": [2, 3, 4],
        "depths": [1, 1, 1],
        "key_dim": [8, 8, 8],
        "mlp_ratio": [2, 2, 2],
        "attention_ratio": [2, 2, 2],
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lilt": {"hidden_size": 24, "channel_shrink_ratio": 2},
    "mamba2": {"head_dim": 2 * HEAD, "n_groups": 2},
    "mimi": {"codebook_size": 64},
    "mistral4": {"head_dim": 2 * HEAD},
    "mobilebert": {"intra_bottleneck_size": 16, "num_feedforward_networks": 2},
    "mobilevitv2": {"image_size": 64, "patch_size": 2, "base_attn_unit_dims": [16, 16, 16], "width_multiplier": 0.25},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "phi": {"rope_parameters": HALF_ROTARY},
    "pp_lcnet": {"block_configs": [[[3, 8, 8, 2, False]]] * 5, "stem_channels": 8, "class_expand": 32},
    "pvt": {"sequence_reduction_ratios": [2, 1]},
    "qwen4_exp_text": {
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD,
    },
    "reformer": {"attn_layers": ["local", "local"], "axial_pos_embds": False, "attention_head_size": HEAD},
    "siglip2_vision_model": {"num_patches": 16},
    "stablelm": {"rope_parameters": HALF_ROTARY},
    "swin": SWIN,
    "swinv2": SWIN,
    "t5": {"decoder_start_token_id": SPECIAL["pad"]},
    "textnet": {"image_size": 64, "hidden_sizes": [8, 16, 32], "stem_out_channels": 8},
    "xmod": {"default_language": "en_XX"},
    "zamba": ZAMBA,
    "zamba2": ZAMBA,
    "zaya": {"num_experts_per_tok": 1},
}
"""What a family needs beyond the table of sizes, by model type; also used for configs inside configs."""
