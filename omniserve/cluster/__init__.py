"""Ray starts what a server has on other machines: CPU hosts, ranks and prefill engines.

Ray places these processes on the nodes of a cluster, and starts one again that dies. No tensor goes through it: rows,
KV and collectives have connections of their own.
"""
