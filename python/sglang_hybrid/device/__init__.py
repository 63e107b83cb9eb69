"""Memory behind address ranges: CUDA driver and host backings, arenas, tensors over them."""
