"""Open a checkpoint and inspect how it attends and rotates."""
