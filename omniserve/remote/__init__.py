"""Other machines: CPU hosts and prefill engines, as an engine uses them, and the servers of CPU hosts.

Each connection begins with ``handshake``. ``network_hosts`` connects the host tier to CPU hosts (``host_server``).
``prefill_engines`` asks engines that compute prompts for others (``omniserve.prefill``), ``prefill_receiver`` takes the
KV that they send, and ``prefill_ranks`` does so for the ranks other than rank 0.
"""
