"""From texts and chats to token ids, and back to text."""
