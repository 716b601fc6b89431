"""Writes checkpoints: folders in which every rank has a file of its own. gan/files/checkpoint.py reads them."""
