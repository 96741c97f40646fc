"""Studies: the study file, the executor, and the engines that run its work items."""
