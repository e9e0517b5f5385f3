"""The simulator against the engine: parts of ``benchmarks.simulator_validation``."""
