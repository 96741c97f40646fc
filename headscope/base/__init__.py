"""What every layer may import: names of heads and models, declarations of probes, and their registry."""
