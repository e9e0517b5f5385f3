"""What the benchmarks share: a server process, an open-loop client, statistics, records."""
