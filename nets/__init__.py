"""The networks, as plain torch modules."""
