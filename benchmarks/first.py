"""What comes before the first explanation, in processes of their own: imports, trace, plan and warm-up."""

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from subject import verdict

from relprop.reproduction.tables import markdown

ROWS = {
    "import": ("`import relprop` and all that `explain` needs, torch imported before", 1.5),
    "plan": ("`relprop.plan`: trace and plan", None),
    "explain": ("the first `relprop.explain` thereafter, batch 1", None),
    "first": ("both together: from a model to its first explanation", 1.0),
    "later": ("a later `relprop.explain`", None),
    "help": ("`relprop --help`, the whole process", 1.0),
}
"""What is timed, and the most seconds that it may take."""

CALLS = """
import json, sys, time
import torch
begin = time.perf_counter()
import relprop
relprop.plan, relprop.explain  # which imports what they need
spent = {"import": time.perf_counter() - begin}
from subject import images, resnet
torch.set_num_threads(int(sys.argv[1]))
model, (x, target) = resnet(), images(1, int(sys.argv[2]))
for name, call in {
    "plan": lambda: relprop.plan(model),
    "explain": lambda: relprop.explain(model, x, target, preset="paper"),
    "later": lambda: relprop.explain(model, x, target, preset="paper"),
}.items():
    begin = time.perf_counter()
    call()
    spent[name] = time.perf_counter() - begin
print(json.dumps(spent))
"""
HELP = "import sys; sys.argv = ['relprop', '--help']; from relprop.cli import main; sys.exit(main())"


@dataclass(frozen=True)
class Settings:
    """How much is run."""

    side: int = 224
    rounds: int = 6


QUICK = Settings(side=32, rounds=1)


def measure(settings: Settings) -> dict[str, Any]:
    """The best seconds of several new processes."""
    found = []
    for _ in range(settings.rounds):
        said = run(CALLS, str(torch.get_num_threads()), str(settings.side))
        begin = time.perf_counter()
        run(HELP)
        found.append(json.loads(said) | {"help": time.perf_counter() - begin})
        found[-1]["first"] = found[-1]["plan"] + found[-1]["explain"]
    best = min(found, key=lambda each: each["first"])  # whose parts add up
    alone = {name: min(each[name] for each in found) for name in ("import", "help")}
    return {"rounds": settings.rounds, "seconds": best | alone}


def run(code: str, *args: str) -> str:
    """Run code in a new interpreter that finds what this one does; return what it prints."""
    ask = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{code}", *args]
    return subprocess.run(ask, check=True, capture_output=True, text=True).stdout


def table(data: dict[str, Any]) -> str:
    """Seconds, and the verdicts."""
    spent = data["seconds"]
    lines = [[f"ResNet-50, best of {data['rounds']} processes", "seconds"]]
    lines += [[label, f"{spent[name]:.2f}"] for name, (label, _) in ROWS.items()]
    verdicts = [verdict(label, spent[name], bar, data, " s") for name, (label, bar) in ROWS.items() if bar]
    return "\n".join([markdown(lines), "", *verdicts])
