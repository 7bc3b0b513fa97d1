"""What explanations of ResNet-50 and measures of them cost: in forward passes, in memory, at the start, part by part.

`make bench` runs this and prints Markdown; benchmarks/README.md says how to read it, and has what came out.
"""

import argparse
from pathlib import Path

import torch
from record import SECTIONS, TITLES, measured, save, shown, write
from subject import SEED, THREADS


def main() -> None:
    """Measure the sections one by one and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS, default=[*SECTIONS], metavar="NAME", help=", ".join(SECTIONS)
    )
    parser.add_argument("--quick", action="store_true", help="tiny images, one round: does the script still run?")
    parser.add_argument(
        "--save", type=Path, metavar="DIR", help="keep results.json there, and write its README.md anew"
    )
    parser.add_argument(
        "--page", type=Path, metavar="DIR", help="only write a folder's README.md from its results.json"
    )
    args = parser.parse_args()
    if args.page:
        write(args.page)
        return
    torch.set_num_threads(1 if args.quick else THREADS)
    torch.manual_seed(SEED)
    for name in args.only:
        data = measured(name, args.quick)
        print(f"## {TITLES[name]}\n\n{shown(name, data)}\n", flush=True)
        if args.save:  # after each, so that a run that is stopped has what it had
            args.save.mkdir(parents=True, exist_ok=True)
            save(args.save, name, data)
            write(args.save)


if __name__ == "__main__":
    main()
