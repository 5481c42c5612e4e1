"""Warp-specialised kernels for Hopper (sm_90) in Gluon: their parts, launch and constraints."""
