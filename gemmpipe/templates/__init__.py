"""Kernels that several families share: their device functions, candidates, builds and launches."""
