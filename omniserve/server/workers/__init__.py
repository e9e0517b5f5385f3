"""Several API processes on one port (``--api-processes``): workers do HTTP and text, their owner the rest.

The owner is the server's first process. It has the engines, the keys' rates, the queues' limits, the metrics' totals,
batches and stored responses (``pool``). A worker (``process``) accepts connections, and for the routes that engines
answer it checks requests, tokenizes, detokenizes and writes answers; ``remote`` is what it has in the place of the
engines. All other routes it hands on to the owner's own application (``forwarding``), so that they answer as one
server's do.
"""
