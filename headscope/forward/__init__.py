"""Forward passes: capture, observers, logits, the prefix cache and the streaming cache."""
