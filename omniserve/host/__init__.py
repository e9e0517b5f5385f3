"""The host tier: CPU memory and CPU threads that hold best-effort KV and compute its decode attention."""
