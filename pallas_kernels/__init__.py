"""Attention and rotation kernels: arrays in, arrays out."""
