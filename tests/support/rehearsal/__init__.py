"""What stands in for devices, groups and systems that are not these ones; each file says what."""
