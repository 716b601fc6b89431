"""The built-in data set: faces that are drawn, with their masks."""
