"""What updates a player's weights."""
