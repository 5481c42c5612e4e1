"""Kernels compiled, hashed, loaded and launched."""
