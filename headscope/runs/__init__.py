"""Runs: declared tables and columns, the writer, the reader, and the wide per-head table."""
