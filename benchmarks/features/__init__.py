"""Features on and off: what each of them brings and costs (``python -m benchmarks.features --list``)."""

from benchmarks.common.cases import Benchmark

FEATURES = Benchmark("features")
