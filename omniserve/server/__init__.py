"""HTTP server with OpenAI's API. The API runs in one process, the engine in another.

``cli`` reads flags, ``serve`` runs and stops everything, ``api`` and ``generate`` have the routes, ``protocol`` checks
requests, ``output_stream`` drives engine requests through ``engine_client``, ``engine_process`` is the other side
(``engine_messages`` goes between them), and ``answers`` shapes what comes back. ``process`` has what both processes set
up for themselves.
"""
