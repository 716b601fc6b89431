"""Checkpoints: directories to which every rank writes what it owns."""
