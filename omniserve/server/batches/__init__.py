"""OpenAI's Files and Batch API, durable: what was accepted survives the death of the server.

``database``, ``tables`` and ``rows`` are the database; on it, ``store`` is what clients do, ``progress`` and ``claims``
what servers do with batches and lines, ``leftovers`` the files that nobody knows. ``files`` is the disk, ``storage``
both. ``lines`` checks an input file, ``line_run`` runs a line of it, ``outputs`` writes the result files, ``urgency``
says when a batch is late.

``runner`` is the work on them, made of loops and threads (``loops``): ``line_worker`` claims lines, ``running_lines``
has those that run, ``leases`` holds them, ``hurry`` lets those of late batches hurry, ``batch_worker`` validates and
finalizes whole batches.

``objects`` and ``routes`` are what clients see, ``settings`` the flags. ``serving`` is a server's part, ``offline`` and
``remote`` are those of ``python -m omniserve.batch``.
"""
