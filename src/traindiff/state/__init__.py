"""Saved weights: what a checkpoint holds, and whether two of them hold the same model (traindiff explain weights.md).

Read `dtypes` and `stored` (a tensor on disk, slab by slab), `sources/` (one file per format), `equal_bits` and
`measured` (one pass over both sides), `pairing` (which tensor is which), `elements` and `arrangements` (how two tensors
differ), `comparing` and `comparison` (the verdict), in this order.
"""
