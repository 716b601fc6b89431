"""One policy a file: how one player lives on the devices."""
