"""Triton kernels: plain modules with launch functions, imported when first used (a CPU install has no triton).

With ``TRITON_INTERPRET=1`` in the environment before triton is imported, they take CPU tensors.
"""
