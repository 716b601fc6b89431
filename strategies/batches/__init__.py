"""What belongs to a sample, and what to a rank: loaders, batches and random draws."""
