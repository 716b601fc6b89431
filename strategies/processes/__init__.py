"""Starting ranks, stopping them together, and noticing a lost one."""
