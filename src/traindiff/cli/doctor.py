"""`traindiff doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from traindiff.cli.app import JsonOption, app, messages, print_result, results, says_what_is_wrong


@app.command(short_help="Check that recording changes nothing here.")
@says_what_is_wrong
def doctor(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="The training: FILE.py:FUNCTION or MODULE:FUNCTION that returns a traindiff.Training. A small model "
            "if left out.",
        ),
    ] = "",
    steps: Annotated[int, typer.Option(min=1, help="Steps of each training whose bits are compared.")] = 3,
    rounds: Annotated[int, typer.Option(min=0, help="Pairs of steps that are timed; 0 times nothing.")] = 9,
    compiled: Annotated[bool, typer.Option(help="Also with torch.compile.")] = True,
    backend: Annotated[str, typer.Option(help="Backend of torch.compile, e.g. inductor.")] = "aot_eager",
    as_json: JsonOption = False,
) -> None:
    """Check on this machine that recording changes nothing and misses nothing, and what it costs.

    The training is run with and without a recording, eagerly and compiled, and compared bit by bit. Exits
    with 0 if no check failed, 1 if one did, and 2 if RECIPE cannot be used.
    """
    from traindiff.observe.torch.session.environment import describe
    from traindiff.present.text.doctor import SelfTest, print_self_test
    from traindiff.run.doctor.checks import Check, Plan, run_checks
    from traindiff.run.doctor.training import built_in, check_backend, try_out
    from traindiff.run.verify.recipe import load_recipe

    training = load_recipe(recipe, asked_by="doctor") if recipe else built_in
    try_out(training)
    check_backend(backend)
    plan = Plan(recipe=training, steps=steps, rounds=rounds, backend=backend if compiled else None)
    checks: list[Check] = []
    with messages.status("checking") as status:
        for check in run_checks(plan):
            checks.append(check)
            status.update(f"checking, after: {check.name}")
    about = describe()
    found = SelfTest(
        subject=recipe or "the built-in model",
        checks=tuple(checks),
        versions=about["versions"],
        environment=about["environment"],
    )
    print_result(found, "json" if as_json else "text", text=lambda: print_self_test(results, found))
    raise typer.Exit(0 if found.healthy else 1)
