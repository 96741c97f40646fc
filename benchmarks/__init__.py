"""Timings for developers, outside the wheel: `python -m benchmarks MODE`, or `make bench-MODE`."""
