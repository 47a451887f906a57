"""Kernels and device memory of the taps on CUDA."""
