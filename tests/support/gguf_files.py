"""Small GGUF files, complete or not."""

from pathlib import Path

import numpy as np
from gguf import GGUFWriter


def write_gguf(path: Path, blocks: int, leave_out: str = "") -> None:
    """A llama GGUF of two blocks of width 8, with the tensors of only `blocks` of them."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(16)
    if blocks >= 0:
        for name, shape in {"token_embd": (16, 8), "output_norm": (8,), "output": (16, 8)}.items():
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    for block in range(blocks):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            if name != leave_out:
                writer.add_tensor(f"blk.{block}.{name}.weight", np.ones((8, 8), np.float32))
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{block}.{name}.weight", np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
