"""Loss scales of two runs: what to say of them, and the factors that a wrong treatment of them would leave."""

from __future__ import annotations


def scale_factors(baseline: float, candidate: float) -> list[tuple[float, str]]:
    """Factors that a wrong treatment of the loss scales would leave, and what to say of them."""
    found = []
    for name, scale in (("candidate", candidate), ("baseline", baseline)):
        if scale != 1.0:
            more, less = (scale, 1.0 / scale) if name == "candidate" else (1.0 / scale, scale)
            found.append((more, f"= the {name}'s loss scale {scale:g}: never divided out?"))
            found.append(
                (less, f"= 1/{scale:g}, one over the {name}'s loss scale: divided out without being applied, or twice?")
            )
    return found


def scale_note(baseline: float, candidate: float) -> str:
    """What to say of two runs with other loss scales; empty where they are the same."""
    if baseline == candidate:
        return ""
    scales = [f"{scale:g}" if scale != 1.0 else "none" for scale in (baseline, candidate)]
    return f"Loss scales differ ({scales[0]} in the baseline, {scales[1]} in the candidate); they are divided out."
