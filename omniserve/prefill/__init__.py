"""A prefill engine: computes prompts for other engines, and sends them the KV."""
