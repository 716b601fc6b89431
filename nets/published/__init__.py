"""Networks that others have published: their weights into our networks, and ours back out again."""
