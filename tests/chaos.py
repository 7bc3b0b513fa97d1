"""A study whose workers are killed at random and whose driver is killed twice: ``python tests/chaos.py --minutes 10``.

A cluster of two nodes on this machine, each with one CPU, works on a study of a small network; every piece takes a
second, so that there is something to kill. Every few seconds a worker gets a SIGKILL, by lot, and at a third and at two
thirds of the time the driver does, and is started again. When the time is up, nobody is killed any more, and the study
ends. Its rows have to be those of one process that was left alone, to the last digit. On stdout: what happened.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tiny
import torch
from torch import Tensor, nn

import relprop
from relprop.cluster import Cluster
from relprop.methods import Method
from relprop.study import Study, evaluate, read, tabulate

HERE = Path(__file__).resolve()
PAUSE = "RELPROP_CHAOS_PAUSE"
ASKED: dict[str, Any] = {"protocol": "both", "points": 3, "seeds": 1, "batch_size": 2}


def _pausing(_: nn.Module, x: Tensor, __: Tensor) -> Tensor:
    time.sleep(float(os.environ.get(PAUSE, "0")))  # set for the workers of the cluster alone
    return x.abs()


def _study(photos: Path, out: Path | None, address: str | None) -> Study:
    pausing = Method("pausing", "control", "none", 0, "a script's", _pausing)
    engine = Cluster(address) if address else None
    return evaluate(tiny.model(), photos, ["paper", "random+hq", pausing], out=out, engine=engine, **ASKED)


def _workers() -> list[int]:
    """The workers at work: processes that Ray names so, below those that this one has started."""
    parents, names = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            names[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (OSError, ValueError):  # noqa: PERF203 - it has ended meanwhile
            continue

    def mine(pid: int) -> bool:
        while pid > 1:
            if pid == os.getpid():
                return True
            pid = parents.get(pid, 0)
        return False

    return [pid for pid, name in names.items() if name.startswith("ray::Worker") and mine(pid)]


def main(minutes: float, images: int, seed: int) -> None:
    """Runs it, and tells what happened."""
    from ray.cluster_utils import Cluster as Nodes

    draw, folder = random.Random(seed), Path(tempfile.mkdtemp(prefix="chaos-"))
    photos = tiny.photos(folder / "photos", images)
    os.environ[PAUSE] = "1"  # the nodes inherit it
    node = {"num_cpus": 1, "object_store_memory": 80_000_000}
    nodes = Nodes(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    nodes.add_node(**node)
    del os.environ[PAUSE]

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, HERE, "--driver", photos, folder / "study", nodes.address]
        log = (folder / "driver.log").open("ab")
        return subprocess.Popen(command, stdout=log, stderr=log)

    begin, driver = time.monotonic(), start()
    kills, drivers = 0, 0
    due = begin + draw.uniform(8, 20)
    while driver.poll() is None:
        time.sleep(0.05)
        spent = time.monotonic() - begin
        if drivers < 2 and spent > (drivers + 1) * minutes * 60 / 3:
            driver.kill()
            driver.wait()
            drivers, driver = drivers + 1, start()
        if time.monotonic() > due and spent < minutes * 60 and (alive := _workers()):
            os.kill(draw.choice(alive), signal.SIGKILL)
            kills += 1
            due = time.monotonic() + draw.uniform(8, 20)
    seconds = time.monotonic() - begin
    alone = _study(photos, None, None)
    found = read(folder / "study") if driver.returncode == 0 else []
    told = json.loads((folder / "study" / "manifest.json").read_text())
    nodes.shutdown()
    report = {
        "seconds": round(seconds),
        "workers killed": kills,
        "drivers killed": drivers,
        "last driver's exit code": driver.returncode,
        "images": images,
        "rows": len(found),
        "rows are those of one process, to the last digit": tuple(found) == alone.rows,
        "tables are the same": bool(found) and str(tabulate(found, "random+hq")) == str(alone.table("random+hq")),
        "failures": told.get("failures"),
        "workers that died under the last driver": told.get("engine", {}).get("workers that died"),
        "versions": told["packages"] | {"ray": told.get("engine", {}).get("cluster"), "python": told["python"]},
        "folder": str(folder),
    }
    print(json.dumps(report, indent=2))
    sys.exit(not report["rows are those of one process, to the last digit"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    paths = [str(HERE.parent), str(Path(relprop.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--images", type=int, default=1600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--driver", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.driver:
        _study(Path(args.driver[0]), Path(args.driver[1]), args.driver[2])
    else:
        main(args.minutes, args.images, args.seed)
