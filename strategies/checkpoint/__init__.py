"""Writes checkpoints: folders in which every rank has a file of its own. gan/checkpoint.py reads them."""
