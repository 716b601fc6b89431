"""What the commands and samples/ share: opening a run, pictures and styles to paint with, grids and tables."""
