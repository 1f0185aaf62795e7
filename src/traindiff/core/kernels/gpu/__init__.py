"""The GPU kernel: one Triton launch per tensor, or per step of many, and nothing that waits for the device.

Read `layout` (one summary as 64-bit words), `dtypes`, `plan` (how a shard is divided among programs),
`blocks` and `profiles` (the arithmetic), `launch` (the kernels), `table` (many tensors in one launch) and
`rows` (the buffers of a step, and their way to the host), in this order.

Every program writes the summary of its part of a tensor. Summaries merge, so what a small tensor needs
is one program that writes the tensor's row; a large one gets many, whose rows a second kernel merges,
once a step and for all tensors together. There are no atomics: the same launches give the same bits.
"""
