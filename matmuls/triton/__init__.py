"""Triton kernels, one file per operation, and their configurations. Imported when a CUDA tensor first needs them."""
