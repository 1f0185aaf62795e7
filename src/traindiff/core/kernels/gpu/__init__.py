"""The GPU kernel: one Triton launch per tensor, or per step of many, and nothing that waits for the device.

Read `layout` (dtypes, and a summary as 64-bit words), `plan` (how a shard is divided among programs), `decoding` and
`blocks` (the arithmetic), `launch` (the kernels), `table` (many tensors in one launch) and `rows` (the buffers of a
step, and their way to the host), in this order.

Every program writes the summary of its part of a tensor. A small tensor needs one program, which writes the tensor's
row. A large tensor gets many programs, whose rows a second kernel merges, once per step and for all tensors together.
There are no atomics: the same launches give the same bits.
"""
