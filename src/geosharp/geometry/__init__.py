"""From verified blocks to a chart: the canonical representative, whitened coordinates, and the walk away from it.

Knows no losses.
"""
