"""Attention backend: hooks into every attention layer of a model, the fused kernels, and the attention record."""
