"""The options compile and recompute, which a policy can have in addition."""
