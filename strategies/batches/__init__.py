"""What belongs to a sample, and what to a rank: loaders, batches, random draws, and objects that a loss can reach."""
