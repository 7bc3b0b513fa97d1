"""The verb that looks at the installation."""

# ruff: noqa: D301, PLC0415
# D301: \b keeps the lines of the examples apart. PLC0415: torch is imported where it computes, so that --help is quick.

from __future__ import annotations

import json
from typing import Annotated

import typer

from relprop import __version__
from relprop.runs import DONE, SOME_FAILED


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON to stdout.")] = False,
) -> int:
    """Look at the installation: versions, devices, weights, and what is missing.

    \b
    relprop doctor
    relprop doctor --json > doctor.json

    Nothing is fetched or changed. Exit code 1 says that there is a problem; what is only missing for some uses is a
    note, with the command that gets it.
    """
    from relprop.doctor import examine

    found = []
    for finding in examine():
        found.append(finding)
        if not as_json:
            remedy = f"; {finding.remedy}" if finding.remedy else ""
            typer.echo(f"{finding.state:<8} {finding.topic:<8} {finding.name}: {finding.text}{remedy}")
    problems, notes = (sum(finding.state == state for finding in found) for state in ("problem", "note"))
    if as_json:
        content = {"relprop": __version__, "problems": problems, "findings": [f.to_dict() for f in found]}
        typer.echo(json.dumps(content, indent=2))
    else:
        verdict = f"{problems} problems" if problems != 1 else "1 problem"
        typer.echo(f"relprop {__version__}: {verdict if problems else 'all is well'}, {notes} notes.")
    return SOME_FAILED if problems else DONE
