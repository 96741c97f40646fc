"""Activation patching and path patching: what one activation of another prompt changes."""
