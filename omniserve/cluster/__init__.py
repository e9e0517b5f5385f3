"""Ray starts what a server has on other machines: CPU hosts, and ranks of tensor parallel.

Ray places these processes on the nodes of a cluster, and starts one again that dies. No tensor goes through it: rows,
KV and collectives have connections of their own.
"""
