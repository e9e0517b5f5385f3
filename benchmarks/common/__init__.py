"""Parts that the benchmarks share: servers, an open-loop client, loads, figures of what it saw, models, records."""
