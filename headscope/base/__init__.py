"""Shared by most layers, without torch: names of heads and models, user input, declarations of probes and registry."""
