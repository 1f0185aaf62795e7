"""docs/rules.md, made from the docstrings and limits of the rules: `python -m tests.analyse.check.rules_document`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

from traindiff.analyse.rules import RULES, Rule

PAGE = Path(__file__).parents[3] / "docs" / "rules.md"

HEAD = """\
# The rules of `traindiff check`

`traindiff check RECORDING` applies the rules below to one run; `traindiff check --list` lists them. A broken rule
makes the run *unhealthy* (exit code 1). Some rules only *warn*: their findings are worth knowing but may be intended,
and the run stays healthy. Each finding has a step, a site and numbers, and says what to do.

A rule that found nothing may have had nothing to judge. Then its answer is *not applicable*: the run lacks what the
rule needs, such as several ranks, or has fewer steps than its limit `least_steps`. The output counts these rules; the
report and `--json` name them, and what they need.

A false alarm is worse than a miss, so limits are far from the values of healthy runs. They were tried on the demo's
GPT, and on classifiers with linear layers and with convolutions: in float32, in bfloat16 and float16 under autocast,
with a loss scaler, dropout, weight decay, warm-up from 0, decay to 0, frozen layers, and a head of zeros. None of
these breaks a rule or gives a warning. The 23 trainings of `benchmarks/zoo`, 25 steps each, in float32, in bfloat16
and under autocast, break only rules about numbers: bfloat16 loses updates, and L-BFGS diverges.

`--rules A,B` applies only these rules, `--skip A,B` omits them. `--ignore GLOB` sets aside what is found at some sites
(a path, or a path and a slot): a note counts it, and the verdict is that of the others. A finding about several
parameters is set aside only if all of them are. `--config FILE.toml` sets other limits:

```toml
[spike]
deviations = 20

[dead-units]
share = 0.25
```

`traindiff.check(recording, rules="spike,dead-units", config="limits.toml")` does the same. `config` may also be the
mapping itself. An unknown name is an error that suggests the nearest one.

Rules see each step once, in one pass over the recording. From step to step they keep a few numbers for each site.
[Extending](extending.md) describes how to add a rule.
"""


def document() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(line for rule in RULES for line in _section(rule))])


def _section(rule: type[Rule]) -> Iterator[str]:
    kinds = ", ".join(f"`{kind}`" for kind in rule.kinds)
    yield f"## `{rule.name}`\n"
    yield f"{rule.finds} {'Warns' if rule.warns else 'Makes a run unhealthy'}; kinds of finding: {kinds}.\n"
    yield f"{inspect.getdoc(rule)}\n"
    if rule.needs:
        yield f"Needs {rule.needs}.\n"
    if rule.limits:
        yield "| limit | default | what it is |"
        yield "| --- | --- | --- |"
        yield from (f"| `{name}` | {limit.default:g} | {limit.message} |" for name, limit in rule.limits.items())
        yield ""


if __name__ == "__main__":
    PAGE.write_text(document(), encoding="utf-8")
