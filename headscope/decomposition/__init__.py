"""The residual stream and the weights of heads, split into the parts that heads, MLPs and embeddings contribute."""
