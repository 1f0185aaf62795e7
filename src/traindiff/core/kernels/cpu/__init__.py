"""The CPU kernel: explicit SIMD through LLVM, built on the user's machine without a compiler.

Read `values` and `code` (how LLVM IR is written here), `layout` (dtypes, and the state in memory), `groups`, `totals`
and `profiles` (the arithmetic), `module` (putting it together), `memory` (calling it on an address), `summarize` and
`arrays` (on a torch tensor and on a NumPy array), in this order.
"""
