"""`python -m gan.plan`: what a run would need and move on many devices, found out without them."""
