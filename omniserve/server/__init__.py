"""HTTP server with OpenAI's API. The API runs in one process, each engine in another.

``cli`` reads flags, ``serve`` runs and stops everything, ``http_process`` makes what answers HTTP, ``api`` and
``generate`` have the routes. ``completions``, ``responses``, ``anthropic`` and ``embeddings`` each check requests of
an API and shape its answers; ``dialects`` reads what models write. ``prompts`` makes token ids of requests,
``output_stream`` drives engine requests through ``engines``, ``access`` holds API keys and limits, and
``telemetry`` metrics and traces. ``workers`` are more processes that serve HTTP on the same port.
"""
