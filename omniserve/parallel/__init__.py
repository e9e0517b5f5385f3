"""Several processes that serve one model: the ranks of tensor parallelism.

Rank 0 is the engine's process, with the scheduler and the sampler. The other ranks are told each plan and run the same
``ModelRunner``, each with its part of the weights and of the KV heads, and with a host tier for these.
"""
