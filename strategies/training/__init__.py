"""What the strategy is made of: how ranks meet, what each player gets, and how a training goes."""
