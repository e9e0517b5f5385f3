"""Parts of benchmarks.simulator_validation: loads, places where an engine runs, and errors of single requests."""
