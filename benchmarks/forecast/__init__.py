"""Parts of ``benchmarks.gpu_forecast``: what a step on a GPU reads, writes and launches, counted without one."""
