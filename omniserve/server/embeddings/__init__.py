"""Embeddings, and scores of pairs of texts: what the model's files say of them, requests, answers and routes."""
