"""Policies on one load of LS and BE requests: parts of ``benchmarks.coserve``."""
