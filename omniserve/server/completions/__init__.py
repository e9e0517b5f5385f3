"""/v1/completions and /v1/chat/completions: the fields of their requests, and their answers."""
