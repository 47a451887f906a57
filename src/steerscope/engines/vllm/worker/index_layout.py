"""The numbers that the step index, the taps and their kernels agree on."""

# Columns of the index: overflow flag, first cell, group, distance to the cell of the next decoded token, and the ops,
# three numbers each: vector slot, coefficient slot, gate.
FLAG, CELL, GROUP, STRIDE, ENTRIES = range(5)
PRECOMPUTED = 1 << 30  # added to the flag: what the ops add was computed before the step (`cuda.precomputed_ops`)

# Added to a place in `order`: lenses read rows of this group. The row is left behind the cells, at the token's own
# number, so a watched token needs no cell: the rows of one step are read before the next.
WATCHED = 1 << 16
