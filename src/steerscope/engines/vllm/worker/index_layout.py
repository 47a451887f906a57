"""The numbers that the step index, the taps and their kernels agree on."""

# Columns of the index: overflow flag, first cell, group, distance to the cell of the next decoded token, and the ops,
# three numbers each: vector slot, coefficient slot, gate.
FLAG, CELL, GROUP, STRIDE, ENTRIES = range(5)
PRECOMPUTED = 1 << 30  # added to the flag: what the ops add was computed before the step (`cuda.precomputed_ops`)

# Added to a place in `order`: lenses read rows of this group. The row is left behind the cells, at the token's own
# number, so a watched token needs no cell: the rows of one step are read before the next.
WATCHED = 1 << 16

# Partial sums of prompt rows (`prefill_sums`).
FEW = 512  # tokens of a step in which taps sum nothing, at most
ROWS = 16  # of a run, at most
# A run: its first token, number of tokens, distance between tokens, the group that captures them (0: the tokens are not
# summed and do what the index says), and the first cell of its sums.
RUN_NUMBERS = 5
