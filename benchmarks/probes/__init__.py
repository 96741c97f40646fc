"""What probes cost: a module per probe, whose `benchmark_variants` names the calls to time, a reference first."""
