"""Parts of Hopper's warp-specialised kernels."""
