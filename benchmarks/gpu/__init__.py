"""What this project does on a GPU, beside what the hardware allows: one command, ``benchmarks/gpu/run.sh``."""
