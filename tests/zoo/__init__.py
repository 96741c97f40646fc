"""Every causal-LM type of the installed transformers, tiny and random, held against its own eager attention."""
