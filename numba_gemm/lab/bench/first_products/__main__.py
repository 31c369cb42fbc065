"""First products of a process: ``python -m numba_gemm.lab.bench.first_products --out DIR``.

Each case is a process of its own (`child`): one product of NumPy arrays; the 15 products of a training step, which are
five layers, forward and both gradients, of PyTorch tensors; and six odd shapes. It runs with an empty kernel cache,
with what that left, and with an empty cache and a bundle. The import of PyTorch is not counted. Beside it are measured
`precompile` of all kernels in FP32, and in every precision, and the export of the bundle. It writes
`first_products.csv` and `first_products.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from numba_gemm.gemm.precision import PRECISIONS
from numba_gemm.lab.bench.first_products.child import KINDS
from numba_gemm.lab.harness import environment
from numba_gemm.lab.harness.command import (
    add_result_options,
    command,
    csv_text,
    json_text,
    make_folder,
    require_gpu,
    write_files,
)
from numba_gemm.lab.harness.environment import LAUNCHES
from numba_gemm.lab.harness.nvml import sampled_clocks

FILE, HOW = "first_products.csv", "first_products.json"
CHILD = "numba_gemm.lab.bench.first_products.child"
CACHES = ("empty", "filled", "bundle")
CCS = "8.0,8.6,8.9,9.0,10.0,12.0"
LAYOUTS = "NN,NT,TN,TT"
RIGHT = 0


def run(arguments: list[str], **variables: str) -> tuple[str, float]:
    """Run Python in a process of its own; return its last line, and the seconds that it took."""
    begin = time.perf_counter()
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_GEMM_BUNDLE"} | variables
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{done.stderr}")
    return (done.stdout.splitlines() or [""])[-1], time.perf_counter() - begin


def measure(precisions: list[str], ccs: str, place: Path) -> list[dict[str, Any]]:
    """Return the rows of all cases; caches and the bundle lie in `place`."""
    rows: list[dict[str, Any]] = []
    bundle = place / "kernels.bundle"
    of_all = ",".join(PRECISIONS)
    for name, arguments in {
        "precompile, ieee": [],
        "precompile, all precisions": ["--precision", of_all],
        "export of a bundle": ["--precision", of_all, "--layouts", LAYOUTS, "--cc", ccs, "--export", str(bundle)],
    }.items():
        folder = place / name.replace(" ", "_")
        said, seconds = run(["-m", "numba_gemm", "precompile", *arguments], NUMBA_GEMM_CACHE_DIR=str(folder))
        rows.append({"case": name, "cache": "empty", "process_s": seconds, "said": said.replace(str(place), "...")})
        print(rows[-1], flush=True)
    for precision in precisions:
        for kind in KINDS:
            for cache in CACHES:
                folder = place / f"{kind}-{precision}-{'bundle' if cache == 'bundle' else 'own'}".replace(" ", "_")
                variables = {"NUMBA_GEMM_CACHE_DIR": str(folder)}
                if cache == "bundle":
                    variables["NUMBA_GEMM_BUNDLE"] = str(bundle)
                said, seconds = run(["-m", CHILD, kind, precision], **variables)
                count = len(list(folder.glob("*.kernel"))) if folder.is_dir() else 0
                rows.append({"case": kind, "precision": precision, "cache": cache, "kernels_kept": count})
                rows[-1] |= json.loads(said) | {"process_s": seconds}
                print(rows[-1], flush=True)
    return rows


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(prog="python -m numba_gemm.lab.bench.first_products", description=__doc__)
    add_result_options(made)
    made.add_argument("--precisions", default="ieee,bf16x6", help="default: ieee,bf16x6")
    made.add_argument("--ccs", default=CCS, help=f"compute capabilities of the bundle; default: {CCS}")
    return made


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the files and print a table; return the exit status."""
    options = parser().parse_args(arguments)
    require_gpu()
    described = environment.describe(
        simulated=False,
        seed=0,
        cache="cold",
        command=f"python -m numba_gemm.lab.bench.first_products --precisions {options.precisions} --ccs {options.ccs}",
        timing=LAUNCHES,
        stated_commit=options.commit,
    )
    make_folder(options.out)
    with tempfile.TemporaryDirectory() as place, sampled_clocks(environment.current_nvml()) as clocks:
        frame = pd.DataFrame(measure(options.precisions.split(","), options.ccs, Path(place)))
    environment.conclude(described, [clocks.median_mhz], [clocks.throttle])
    write_files(options.out, {FILE: csv_text(frame, 4), HOW: json_text(described)})
    print(frame.to_string(index=False))
    return RIGHT


if __name__ == "__main__":
    sys.exit(main())
