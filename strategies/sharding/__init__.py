"""Weights in buckets, of which each rank owns a shard."""
