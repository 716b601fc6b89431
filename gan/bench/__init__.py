"""`python -m gan.bench`."""
