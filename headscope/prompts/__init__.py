"""Inputs as data: text sources, haystacks, needles. Knows tokenizers, not models."""
