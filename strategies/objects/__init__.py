"""The objects of the author's own code."""
