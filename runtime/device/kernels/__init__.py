"""Kernels of the step-logic stages for GPUs of NVIDIA, which take the place of the exported graphs."""
