"""Anthropic's Messages API: its fields, chats that are made of them, its answers and its errors."""
