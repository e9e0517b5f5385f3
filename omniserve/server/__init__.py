"""HTTP server with OpenAI's API. The API runs in one process, the engine in another.

``__main__`` and ``cli`` read flags, ``serve`` runs and stops everything, ``api`` routes, ``protocol`` checks requests,
``completions`` and ``chat`` shape answers, ``generation`` drives engine requests through ``engine_client``, and
``engine_process`` is the other side.
"""
