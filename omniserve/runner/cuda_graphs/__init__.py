"""Steps of constant shape: the rows of a step are padded to a bucket, so that one CUDA graph serves many steps.

Paper: omniserve 4 (a row count that is constant through the step is what lets piggybacking be part of the graph).
"""
