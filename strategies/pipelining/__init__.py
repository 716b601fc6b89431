"""A player in stages: each rank computes a part of the network, for the samples of several ranks."""
