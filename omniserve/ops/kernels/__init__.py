"""Triton kernels, one module an idea; imported when first used."""
