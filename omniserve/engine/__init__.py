"""The engine: adds and ends requests, runs steps, and owns the scheduler, the runner and both tiers."""
