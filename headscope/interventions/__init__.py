"""Interventions on attention heads: edits compose, one place applies them, one replay evaluates them."""
