"""The games, one file each, to be read beside the paper."""
