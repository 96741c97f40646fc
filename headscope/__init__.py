"""headscope: a microscope for the attention heads of rotary language models."""
