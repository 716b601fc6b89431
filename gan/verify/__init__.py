"""`python -m gan.verify`."""
