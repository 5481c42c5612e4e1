"""Compiling, hashing, loading and launching kernels."""
