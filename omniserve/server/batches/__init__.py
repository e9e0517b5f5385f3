"""OpenAI's Files and Batch API, durable: what was accepted survives the death of the server.

``database``, ``tables``, ``store`` and ``claims`` are the database, ``files`` the disk, ``storage`` both. ``lines``
checks an input file, ``line_run`` runs a line of it, ``outputs`` writes the result files, ``urgency`` says when a batch
is late, ``runner`` drives them all. ``objects`` and ``routes`` are what clients see, ``settings`` the flags.
``serving`` is a server's part, ``offline`` and ``remote`` are those of ``python -m omniserve.batch``.
"""
