"""Ways to run a model while listening: capture, logits, shared prefixes, replay, interventions."""
