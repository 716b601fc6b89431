"""SEAN's generator and encoder, with the operations that make them fast."""
