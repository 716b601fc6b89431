"""What is fast and what is slow, measured: `python -m gan.bench NAME` runs one of these."""
