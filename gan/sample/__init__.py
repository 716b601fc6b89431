"""`python -m gan.sample`."""
