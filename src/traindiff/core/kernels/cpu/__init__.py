"""The CPU kernel: explicit SIMD through LLVM, built on the user's machine without a compiler.

Read `values` and `code` (how LLVM IR is written here), `layout` (dtypes, and the state in memory), `groups`, `totals`
and `profiles` (the arithmetic), `module` (putting it together), `summarize` (calling it on a tensor), in this order.
"""
