"""The CPU kernel: explicit SIMD through LLVM, built on the user's machine without a compiler.

Read `values` and `code` (how LLVM IR is written here), `layout` (dtypes, and the state in memory), `groups`, `totals`
and `profiles` (the arithmetic), `module` (putting it together), `memory` (calling it on an address), `summarize` and
`arrays` (on a torch tensor and on a NumPy array), in this order.
"""

import llvmlite.binding

_FIRST_LLVM = 20
"""The LLVM of llvmlite 0.45. Earlier ones give pointers the type of what they point to, and refuse this code."""

if llvmlite.binding.llvm_version_info[0] < _FIRST_LLVM:
    raise ModuleNotFoundError(f"llvmlite {llvmlite.__version__} is too old", name="llvmlite")
