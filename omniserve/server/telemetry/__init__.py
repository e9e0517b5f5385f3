"""What a server tells about itself: Prometheus metrics, traces, the records of calls."""
