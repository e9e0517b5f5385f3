"""Steps of constant shape: the rows of a step are padded to a bucket, so that one CUDA graph serves many steps.

Paper: omniserve 4 (the number of rows is constant through a step, so a graph can include piggybacking).
"""
