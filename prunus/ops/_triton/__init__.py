"""Kernels. Each computes what a definition in plain torch says, and is tested against it."""
