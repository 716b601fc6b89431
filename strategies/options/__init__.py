"""What a policy can be asked for besides: torch.compile, recomputation."""
