"""Tasks of EleutherAI's lm-evaluation-harness, scored on a model under any position scheme (needs the extra `eval`)."""
