"""How the weights of a model are held: packed for a CPU, merged for a GPU, a rank's part of them, as it was loaded.

A rank reads its part of a checkpoint alone: ``unread`` has tensors whose values are still in ``checkpoint_files``.
``parts`` loads a model of these, and reads what ``sharding`` and the stages leave of it.
"""
