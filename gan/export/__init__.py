"""`python -m gan.export`."""
