"""Triton kernels of the measures on a GPU. Only this folder imports Triton; `runtime` decides where it runs."""
