"""Options of tiny vision-language models of several families."""

from typing import Any

TEXT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 14,
}
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}}
IDS = {"image_token_id": 126, "video_token_id": 125, "vision_start_token_id": 124, "vision_end_token_id": 123}

MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": {"model_type": "gemma3_text"}, "vision_config": VISION, "mm_tokens_per_image": 4},
    "llava": {"text_config": {"model_type": "llama"}, "vision_config": {"model_type": "clip_vision_model", **VISION}},
    "llava_next": {"text_config": {"model_type": "mistral"}, "vision_config": VISION},
    "llava_onevision": {"text_config": {"model_type": "qwen2"}, "vision_config": VISION},
    "mistral3": {"text_config": {"model_type": "mistral"}, "vision_config": {"model_type": "pixtral", **VISION}},
    "internvl": {"text_config": {"model_type": "qwen2"}, "vision_config": VISION},
    "idefics3": {"text_config": {"model_type": "llama"}, "vision_config": VISION, "scale_factor": 2},
    "smolvlm": {"text_config": {"model_type": "llama"}, "vision_config": VISION, "scale_factor": 2},
    "qwen2_vl": {"text_config": MROPE, "vision_config": {**QWEN_VISION, "embed_dim": 32, "hidden_size": 64}, **IDS},
    "qwen2_5_vl": {"text_config": MROPE, "vision_config": QWEN_VISION, **IDS},
    "qwen3_vl": {"text_config": MROPE, "vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0]}, **IDS},
    "aya_vision": {"text_config": {"model_type": "cohere2"}, "vision_config": VISION},
}
