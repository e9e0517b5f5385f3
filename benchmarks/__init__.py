"""Benchmarks: each script writes a JSON record that names commit, versions, hardware, configuration and seed."""
