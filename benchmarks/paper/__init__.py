"""The evaluations of the four papers, simulated: parts of ``benchmarks.reproduction``."""
