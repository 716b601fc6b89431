"""`python -m gan.fit`."""
