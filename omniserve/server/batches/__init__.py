"""OpenAI's Files and Batch API, durable: what was accepted survives the death of the server.

Many servers may use a database and take files, batches and cancels. For each model one of them, the **owner**, works on
the batches; another one takes over when it ends.

``database`` and ``tables`` are the database; on it, ``store`` is what clients do, ``progress`` what the owner does,
``leftovers`` the files without an owner. ``owner`` is the lock, and the fence under which the owner writes. ``files``
is the disk. ``lines`` checks an input file, ``line_run`` runs a line of it, ``urgency`` says when a batch is late.

``runner`` becomes the owner and works with ``line_worker``, which runs lines, and ``batch_worker``, which validates and
finalizes whole batches; ``loops`` are the loops and threads of all three.

``objects`` and ``routes`` are what clients see, ``settings`` the flags. ``serving`` is a server's part, ``offline`` and
``remote`` are those of ``python -m omniserve.batch``.
"""
