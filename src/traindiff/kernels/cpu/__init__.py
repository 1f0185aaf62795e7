"""The CPU kernel: explicit SIMD through LLVM, built on the user's machine without a compiler.

Read `code` (how LLVM IR is written here), `dtypes`, `blocks` and `profiles` (the arithmetic), `module`
(putting it together), `summarise` (calling it on a tensor), in this order.
"""
