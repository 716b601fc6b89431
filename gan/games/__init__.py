"""The games, one file each: read beside the paper it plays."""
