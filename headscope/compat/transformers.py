"""Private names of transformers: fields of configs, auto classes, methods of attention modules, weights of GGUF."""

from headscope.compat.library_name import Library, LibraryName

TRANSFORMERS = Library("transformers", ("5.23.0",))
OWN_ATTENTION = "families whose attention is not exchangeable"

ATTENTION_IMPLEMENTATION = LibraryName(
    TRANSFORMERS, "transformers:PreTrainedConfig()._attn_implementation_internal", "selecting its attention backend"
)
ATTENTION_SETTING = LibraryName(
    TRANSFORMERS, "transformers:PreTrainedConfig()._attn_implementation", "telling models apart"
)
NAME_OR_PATH = LibraryName(TRANSFORMERS, "transformers:PreTrainedConfig()._name_or_path", "naming a model")
MODEL_MAPPING = LibraryName(
    TRANSFORMERS, "transformers:AutoModelForCausalLM._model_mapping", "finding the class that opens a config"
)
SUPPORTS_SDPA = LibraryName(
    TRANSFORMERS, "transformers:PreTrainedModel._supports_sdpa", "choosing the attention of plain passes"
)
BLOOM_SPLIT_HEADS = LibraryName(
    TRANSFORMERS, "transformers.models.bloom.modeling_bloom:BloomAttention._reshape", OWN_ATTENTION
)
FALCON_SPLIT_HEADS = LibraryName(
    TRANSFORMERS, "transformers.models.falcon.modeling_falcon:FalconAttention._split_heads", OWN_ATTENTION
)
GPTJ_ATTENTION = LibraryName(TRANSFORMERS, "transformers.models.gptj.modeling_gptj:GPTJAttention._attn", OWN_ATTENTION)
NEOX_JAPANESE_ATTENTION = LibraryName(
    TRANSFORMERS,
    "transformers.models.gpt_neox_japanese.modeling_gpt_neox_japanese:GPTNeoXJapaneseAttention._attn",
    OWN_ATTENTION,
)
GPT_NEO_ATTENTION = LibraryName(
    TRANSFORMERS, "transformers.models.gpt_neo.modeling_gpt_neo:GPTNeoSelfAttention._attn", OWN_ATTENTION
)
GGUF_ARCHITECTURES = LibraryName(
    TRANSFORMERS, "transformers.integrations.gguf:GGUF_CONFIG_ARCHS", "noticing weights of a GGUF file that are dropped"
)
GGUF_TENSOR_PROCESSORS = LibraryName(
    TRANSFORMERS, "transformers.modeling_gguf_pytorch_utils:TENSOR_PROCESSORS", "the weights of a GGUF file"
)
GGUF_TENSOR_PROCESSOR = LibraryName(
    TRANSFORMERS, "transformers.modeling_gguf_pytorch_utils:TensorProcessor", "the weights of a GGUF file", ("config",)
)
GGUF_WEIGHTS_MAP = LibraryName(
    TRANSFORMERS,
    "transformers.modeling_gguf_pytorch_utils:get_gguf_hf_weights_map",
    "the weights of a GGUF file",
    ("hf_model", "processor"),
)
KV_SHARING_DICT = LibraryName(
    TRANSFORMERS, "transformers.cache_utils:KVSharingDict", "layers that share keys and values"
)

COMMIT_HASH = "_commit_hash"
"""Field of a config with the revision of its checkpoint on the hub. headscope sets it too; not every config has it."""
