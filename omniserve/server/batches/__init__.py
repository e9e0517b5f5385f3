"""OpenAI's Files and Batch API, durable: what was accepted survives the death of the server.

Many servers may use a database and take files, batches and cancels. For each model one of them, the **owner**, works on
the batches; another one takes over when it ends.

``database`` has the tables, ``files`` is the disk. On both, ``store`` is what clients do, ``owner`` what the owner
does, with the fence under which it writes; ``locks`` has its lock. ``lines`` checks an input file and runs a line of
it, ``urgency`` says when a batch is late.

``runner`` becomes the owner, validates and finalizes batches, and works with ``line_worker``, which runs lines.
``routes`` are what clients see. ``cli`` and ``offline`` are ``python -m omniserve.batch``.
"""
