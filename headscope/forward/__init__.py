"""Forward passes: capture, observers, logits, prefix cache, replay from a layer, and interventions on heads."""
