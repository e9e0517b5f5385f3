"""Ways to compute decode attention on the CPU: a part of ``benchmarks.cpu_attention``."""
