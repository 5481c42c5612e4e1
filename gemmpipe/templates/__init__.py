"""Kernels that several families share: their device functions, and how each is listed, built and launched."""
