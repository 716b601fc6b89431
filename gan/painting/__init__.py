"""What the commands and samples/ share: a run opened again, its inputs, styles, grids and tables."""
