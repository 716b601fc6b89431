"""How a player's weights are stored: whole, in buckets of which each rank owns a shard, or by DeepSpeed."""
