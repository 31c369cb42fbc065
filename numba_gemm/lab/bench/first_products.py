"""Time that a process waits for its first products.

Each case is a process of its own (`first_products_child`): one product of NumPy arrays, the 15 of a training step in
PyTorch, or six odd shapes; with an empty kernel cache, with what that left, and with an empty cache and a bundle. The
import of PyTorch is not counted. The package is compiled to bytecode first, as pip does when it installs a package.
"""

import compileall
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from numba_gemm.gemm.precision import PRECISIONS
from numba_gemm.lab.bench.first_products_child import KINDS
from numba_gemm.lab.harness.environment import LAUNCHES
from numba_gemm.lab.harness.experiment import Experiment, last_row

CHILD = "numba_gemm.lab.bench.first_products_child"
PACKAGE = Path(__file__).parents[2]
Cache = Literal["empty", "filled", "bundle"]
CACHES: tuple[Cache, ...] = get_args(Cache)
CCS = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
LAYOUTS = "NN,NT,TN,TT"


def run(arguments: list[str], **variables: str) -> tuple[str, float]:
    """Run Python in a process of its own; return its last line, and the seconds that it took."""
    begin = time.perf_counter()
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_GEMM_BUNDLE"} | variables
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{done.stderr}")
    return (done.stdout.splitlines() or [""])[-1], time.perf_counter() - begin


def measured(
    precisions: Sequence[str], ccs: Sequence[str], place: Path, caches: Sequence[str] = CACHES
) -> Iterator[dict[str, Any]]:
    """Yield the rows of all cases; caches and the bundle lie in `place`."""
    bundle = place / "kernels.bundle"
    of_all = ["--precision", ",".join(PRECISIONS)]
    exported = [*of_all, "--layouts", LAYOUTS, "--cc", ",".join(ccs), "--export", str(bundle)]
    cases = {"precompile, ieee": [], "precompile, all precisions": of_all, "export of a bundle": exported}
    for name, arguments in cases.items() if "bundle" in caches else ():
        folder = place / name.replace(" ", "_")
        said, seconds = run(["-m", "numba_gemm", "precompile", *arguments], NUMBA_GEMM_CACHE_DIR=str(folder))
        yield {"case": name, "cache": "empty", "process_s": seconds, "said": said.replace(str(place), "...")}
    for precision in precisions:
        for kind in KINDS:
            for cache in caches:
                folder = place / f"{kind}-{precision}-{'bundle' if cache == 'bundle' else 'own'}".replace(" ", "_")
                variables = {"NUMBA_GEMM_CACHE_DIR": str(folder)}
                if cache == "bundle":
                    variables["NUMBA_GEMM_BUNDLE"] = str(bundle)
                said, seconds = run(["-m", CHILD, kind, precision], **variables)
                count = len(list(folder.glob("*.kernel"))) if folder.is_dir() else 0
                row = {"case": kind, "precision": precision, "cache": cache, "kernels_kept": count}
                yield row | json.loads(said) | {"process_s": seconds}


def first_products(
    precisions: Sequence[str] = ("ieee", "bf16x6"), ccs: Sequence[str] = CCS, caches: Sequence[Cache] = CACHES
) -> Iterator[dict[str, Any]]:
    """Measure the first products of processes.

    Parameters
    ----------
    ccs: Compute capabilities of the bundle.
    caches: Caches that the processes find: "empty", "filled" by the process before, and "bundle". Without the last one,
        `precompile` and the export of a bundle are left out, too.
    """
    compileall.compile_dir(PACKAGE, quiet=2)
    with tempfile.TemporaryDirectory() as place:
        yield from measured(precisions, ccs, Path(place), caches)


EXPERIMENT = Experiment(
    run=first_products,
    progress=last_row,
    needs=("gpu", "torch"),
    unavailable="the simulator has no times",
    cache="cold",
    timing=LAUNCHES,
)
