"""docs/rules.md as the rules themselves say it. `python -m tests.analyse.check.rules_document` writes it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

from traindiff.analyse.rules import RULES, Rule

PAGE = Path(__file__).parents[3] / "docs" / "rules.md"

HEAD = """\
# The rules of `traindiff check`

`traindiff check RECORDING` holds one run against the rules below; `traindiff check --list` lists them. A rule that is
broken makes the run *unhealthy* (exit code 1). Some rules only *warn*: what they find is worth knowing, may be meant,
and leaves the run healthy. Each finding has step, site and numbers, and says what to do. What was not recorded is not
judged: a rule of gradients needs `grad` among what is observed, and so on.

A false alarm is worse than a miss, so limits are far from what healthy runs show. They were tried on the demo's GPT,
and on classifiers with linear layers and with convolutions (in float32, in bfloat16 and float16 under autocast, with
a loss scaler, dropout, weight decay, warm-up from 0, decay to 0, frozen layers, a head of zeros), none of which
breaks a rule or gives a warning.

`--rules A,B` asks these only, `--skip A,B` leaves these out, and `--config FILE.toml` sets other limits:

```toml
[spike]
deviations = 20

[dead-units]
share = 0.25
```

`traindiff.check(recording, rules="spike,dead-units", config="limits.toml")` does the same; `config` may also be the
mapping itself. A name that is not known is an error that says the nearest one.

Rules are asked once for each step, in one pass over the recording; what they keep from step to step is a few numbers
for each site. [Extending](extending.md) says how to add one.
"""


def document() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(line for rule in RULES for line in _section(rule))])


def _section(rule: type[Rule]) -> Iterator[str]:
    kinds = ", ".join(f"`{kind}`" for kind in rule.kinds)
    yield f"## `{rule.name}`\n"
    yield f"{rule.finds} {'Warns' if rule.warns else 'Makes a run unhealthy'}; kinds of finding: {kinds}.\n"
    yield f"{inspect.getdoc(rule)}\n"
    if rule.limits:
        yield "| limit | default | what it is |"
        yield "| --- | --- | --- |"
        yield from (f"| `{name}` | {limit.default:g} | {limit.message} |" for name, limit in rule.limits.items())
        yield ""


if __name__ == "__main__":
    PAGE.write_text(document(), encoding="utf-8")
