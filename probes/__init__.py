"""Questions asked of a model: each probe is cells in, table rows out."""
