"""Open a checkpoint and see how it attends and rotates."""
