"""Decode and prefill attention on the CPU, and the memory limit beside them: parts of ``benchmarks.cpu_attention``."""
