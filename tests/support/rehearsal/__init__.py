"""What stands in for devices and systems that are not this one."""
