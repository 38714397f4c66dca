"""Attention and rotation kernels: arrays in, arrays out. They know no configuration, plan or model."""
