"""`python -m gan.evaluate`."""
