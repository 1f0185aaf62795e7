"""Say which modules are not seen in a step, where that is not as it should be."""

from __future__ import annotations

from traindiff.site import ROOT
from traindiff.watching.module_calls import ModuleCalls

_NO_CALLS = (
    "watch(...): the optimizer stepped in step {step}, but no module of the model was seen to be called in it: "
    "the watch was taken off the modules, or the training calls another one than was given. Gradients and parameters "
    "are still watched. Give watch() the module that the training calls, after all else that changes its modules."
)

_UNHOOKED = (
    "watch(...): in step {step} the hooks of {modules} are gone: something else has removed them. What is given to "
    "these modules, and what they return, is no longer watched. Begin the watch after whatever removes hooks."
)


def unseen(calls: ModuleCalls, step: int) -> str:
    """What to say of modules that were not seen in a step; empty as a rule.

    Modules that are not called are none of them, as long as their hooks are there.
    """
    unhooked = calls.unhooked
    if not calls.num_calls and (unhooked or not calls.order):
        return _NO_CALLS.format(step=step)
    if not unhooked:
        return ""
    more = f" and {len(unhooked) - 1} more modules" if len(unhooked) > 1 else ""
    return _UNHOOKED.format(step=step, modules=f"{unhooked[0] or ROOT}{more}")
