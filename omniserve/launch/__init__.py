"""The way from settings to a running engine: command line flags, the model and its dtype, the latency profile."""
