"""Programs that several processes run together, as ranks of `torch.distributed`, usually on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parents[1]


def run_ranks(
    program: str, world: int, *arguments: str, seconds: int = 240, simulated: bool = True
) -> list[subprocess.CompletedProcess]:
    """Run a program of `support` on each of `world` ranks; return what became of them.

    A program's last arguments are its rank, the number of ranks and the file by which they meet.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["NUMBA_ENABLE_CUDASIM"] = str(int(simulated))
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), str(TESTS), environment.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "ranks")
        children = [
            subprocess.Popen(
                [sys.executable, "-m", f"support.{program}", *arguments, str(rank), str(world), meeting],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(world)
        ]
        try:
            found = []
            for child in children:
                text, _ = child.communicate(timeout=seconds)
                found.append(subprocess.CompletedProcess(child.args, child.returncode, text))
        finally:
            for child in children:
                if child.poll() is None:
                    child.kill()
                    child.wait()
    return found
