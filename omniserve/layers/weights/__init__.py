"""How the weights of a model are held: packed for a CPU, merged for a GPU, a rank's part of them, as it was loaded.

``held`` chooses a form for each linear. ``quantized`` has weights of 4 to 8 bits, ``quantized_modules`` computes with
them, ``int8_modules`` with rows in int8, too; they come from ``gguf`` files, ``quantized_checkpoints``,
``torchao_codes``, or ``quantizing``.
A rank reads its part of a checkpoint alone: ``unread`` has tensors whose values are still in ``checkpoint_files``.
``parts`` loads a model of these, and reads what ``sharding`` and the stages leave of it.
"""
