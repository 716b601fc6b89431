"""Frozen players on ranks of their own: `teacher=zero3@2-3,*=ddp@0-1`."""
