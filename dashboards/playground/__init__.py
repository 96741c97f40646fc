"""The playground: questions about the user's own prompt, answered by models in a worker process."""
