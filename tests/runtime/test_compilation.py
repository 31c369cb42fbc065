"""Compilation of several kernels beside each other: each once, whatever becomes of the processes."""

from __future__ import annotations

import dataclasses
import json
import pickle
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from support.compile_stages import compiler_environment

from numba_gemm.kernels import STAGES
from numba_gemm.kernels.ladder.stage import Variant
from numba_gemm.runtime import compilation

CC = (9, 0)
TASKS = [(stage.kernel_of(stage.configs[0], True), CC) for stage in list(STAGES.values())[:5]]

IN_PROCESSES = """
import json, sys
from numba_gemm.kernels import STAGES
from numba_gemm.kernels.tensor_core import TENSOR_PRECISIONS
from numba_gemm.kernels.tensor_core.decomposition import preparing_kernels
from numba_gemm.runtime import compilation, compiler

kernels = [STAGES[name].kernel_of(STAGES[name].configs[0], True) for name in ("naive", "coalesced", "shared_tile")]
kernels += preparing_kernels(TENSOR_PRECISIONS["fp16x3"], False)
start, started = compilation.start_worker, []
compilation.start_worker = lambda: started.append(start()) or started[-1]

def codes(jobs):
    found = {}
    compilation.compile_all([(k, (9, 0)) for k in kernels], lambda i, cubin, s: found.update({i: cubin}), jobs)
    return [[part.hex() for part in compiler.machine_code(found[i])] for i in range(len(kernels))]

alone, beside = codes(1), codes(3)
served = [worker._ready for worker in started]
print(json.dumps([alone == beside, [len(code) for code in alone], len(started), any(served)]))
"""


def test_workers_compile_the_same_machine_code():
    done = subprocess.run(
        [sys.executable, "-c", IN_PROCESSES], env=compiler_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    same, sections, started, served = json.loads(done.stdout)
    assert same
    assert min(sections) >= 2
    assert started == 2
    assert served


class Worker:
    """A worker without a process: ready once `starts` is set, and `fails` of its kernels do not come back."""

    def __init__(self, machine, fails=0, starts=None):
        self.machine, self.fails, self.stopped, self.compiled = machine, fails, False, []
        self.starts = starts or machine.begun

    def wait_until_ready(self):
        self.starts.wait()
        return not self.stopped

    def compile(self, kernel, cc):
        self.machine.sent.append(kernel)
        if len(self.machine.sent) == len(TASKS) - 1:  # all but the first
            self.machine.gate.set()
        if self.fails:
            self.fails -= 1
            return None
        self.compiled.append(kernel)
        return f"{kernel.name} elsewhere"

    def stop(self):
        self.stopped = True
        self.starts.set()


@pytest.fixture
def machine(monkeypatch):
    """Record kernels that are compiled here and sent to workers, and start the workers that a test supplies.

    Workers are ready once this process has begun with a kernel; it goes on when the gate opens.
    """
    found = SimpleNamespace(here=[], sent=[], workers=[], supply=[], begun=threading.Event(), gate=threading.Event())
    found.gate.set()

    def compile_kernel(kernel, cc, keep_ptx):
        found.begun.set()
        assert found.gate.wait(60)
        found.here.append(kernel)
        return f"{kernel.name} here"

    def start_worker():
        worker = found.supply.pop() if found.supply else None
        found.workers += [worker] * (worker is not None)
        return worker

    monkeypatch.setattr(compilation, "compile_kernel", compile_kernel)
    monkeypatch.setattr(compilation, "start_worker", start_worker)
    return found


def compiled(jobs=8):
    """Compile all tasks; return the results by number."""
    results = {}

    def done(i, cubin, seconds):
        assert i not in results
        assert seconds >= 0
        results[i] = cubin

    compilation.compile_all(TASKS, done, jobs)
    assert sorted(results) == list(range(len(TASKS)))
    assert all(results[i].startswith(kernel.name) for i, (kernel, _) in enumerate(TASKS))
    return results


def test_every_kernel_is_compiled_once(machine):
    machine.supply = [Worker(machine), Worker(machine)]
    machine.gate.clear()
    compiled()
    elsewhere = [kernel for worker in machine.workers for kernel in worker.compiled]
    assert sorted(kernel.name for kernel in machine.here + elsewhere) == sorted(kernel.name for kernel, _ in TASKS)
    assert machine.here == [TASKS[0][0]]
    assert all(worker.stopped for worker in machine.workers)


@pytest.mark.parametrize("jobs", [1, 3, 99])
def test_no_more_processes_than_jobs_or_kernels(machine, jobs):
    machine.supply = [Worker(machine) for _ in range(20)]
    compiled(jobs)
    assert len(machine.workers) == min(jobs, len(TASKS)) - 1


def test_without_workers_all_is_compiled_here(machine):
    compiled()
    assert machine.here == [kernel for kernel, _ in TASKS]


def test_a_worker_that_starts_slowly_is_not_waited_for(machine):
    machine.supply = [Worker(machine, starts=threading.Event())]
    compiled()
    assert len(machine.here) == len(TASKS)
    assert machine.workers[0].stopped


def test_what_a_worker_cannot_compile_is_compiled_here(machine):
    machine.supply = [Worker(machine, fails=2)]
    machine.gate.clear()
    compiled()
    assert len(machine.here) == 3


def test_errors_pass_and_workers_are_stopped(machine, monkeypatch):
    def fail(kernel, cc, keep_ptx):
        raise TypeError("no epilogue")

    machine.supply = [Worker(machine, starts=threading.Event())]
    monkeypatch.setattr(compilation, "compile_kernel", fail)
    with pytest.raises(TypeError, match="no epilogue"):
        compiled()
    assert machine.workers[0].stopped


def test_errors_of_the_caller_pass_from_a_worker_s_thread(machine):
    machine.supply = [Worker(machine)]
    machine.gate.clear()

    def done(i, cubin, seconds):
        if "elsewhere" in cubin:
            machine.gate.set()
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        compilation.compile_all(TASKS, done, 2)
    assert len(machine.here) == 1, "nothing more is begun"


def test_kernels_that_are_not_sent():
    (kernel, _), *_ = TASKS
    assert all(compilation.can_be_sent(kernel) for kernel, _ in TASKS)
    for build in (lambda config, aligned: None, json.dumps):  # without a name of its own; of another package
        assert not compilation.can_be_sent(dataclasses.replace(kernel, build=build))


@pytest.mark.parametrize(("frozen", "executable"), [(True, sys.executable), (False, ""), (False, "/usr/bin/blender")])
def test_no_worker_where_python_cannot_be_started_again(monkeypatch, frozen, executable):
    monkeypatch.setattr(sys, "frozen", frozen, raising=False)
    monkeypatch.setattr(sys, "executable", executable)
    monkeypatch.setattr(compilation, "Worker", None)
    assert compilation.start_worker() is None


def test_a_worker_of_other_sources_compiles_nothing(monkeypatch):
    """The sources may have been edited since this process imported them."""
    worker = compilation.Worker()
    monkeypatch.setattr(compilation, "SOURCES", "others")
    assert not worker.wait_until_ready()
    worker.stop()
    worker = compilation.Worker()
    monkeypatch.undo()
    assert worker.wait_until_ready()
    worker.stop()


def test_a_worker_that_ends_is_no_error(monkeypatch):
    monkeypatch.setattr(compilation, "__spec__", SimpleNamespace(name="no_such_module"))
    worker = compilation.Worker()
    assert not worker.wait_until_ready()
    assert worker.compile(*TASKS[0]) is None
    worker.stop()


@pytest.mark.parametrize("text", ["hello", "cnowhere\nname\n", "0", "(lp0\n."])
def test_a_worker_in_which_text_is_printed_first_compiles_nothing(monkeypatch, tmp_path, text):
    """By a file that Python runs when it starts, for instance. What is printed there may be read as a pickle."""
    (tmp_path / "sitecustomize.py").write_text(f"print({text!r}, end='', flush=True)\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    worker = compilation.Worker()
    assert not worker.wait_until_ready()
    worker.stop()


def test_a_worker_ends_with_the_process_that_started_it():
    """Before it has compiled what it was sent."""
    worker = compilation.Worker()
    assert worker.wait_until_ready()
    process = worker._process
    pickle.dump(
        ({}, STAGES["stream_k"].kernel_of(STAGES["stream_k"].configs[0], Variant("along1", "across1", False)), CC),
        process.stdin,
    )
    process.stdin.close()
    assert process.stdout.read() == b""
    assert process.wait(60) == 1
    process.stdout.close()


def test_jobs(monkeypatch):
    monkeypatch.setenv("NUMBA_GEMM_JOBS", "3")
    assert compilation.default_jobs() == 3
    monkeypatch.setenv("NUMBA_GEMM_JOBS", "")
    assert 1 <= compilation.default_jobs() <= compilation.MAX_JOBS
    monkeypatch.delenv("NUMBA_GEMM_JOBS")
    assert 1 <= compilation.default_jobs() <= compilation.MAX_JOBS
    monkeypatch.setattr(compilation.os, "sched_getaffinity", lambda process: set(range(99)), raising=False)
    for available, jobs in ((0, 1), (3 << 30, 4), (500 << 30, compilation.MAX_JOBS)):
        monkeypatch.setattr(compilation, "_available_bytes", lambda size=available: size)
        assert compilation.default_jobs() == jobs
    for wrong in ("0", "-1", "two", "1.5"):
        monkeypatch.setenv("NUMBA_GEMM_JOBS", wrong)
        with pytest.raises(ValueError, match="expected a number of processes"):
            compilation.default_jobs()


@pytest.mark.parametrize(
    ("text", "size"),
    [("MemTotal: 9 kB\nMemAvailable:    2048 kB\n", 2 << 20), ("", 16 << 30), ("MemAvailable: x", 16 << 30)],
)
def test_available_memory(monkeypatch, text, size):
    monkeypatch.setattr(compilation.Path, "read_text", lambda path, encoding: text)
    assert compilation._available_bytes() == size


IMPORTS = """
import sys
from numba_gemm.kernels import STAGES
from numba_gemm.runtime import kernel_key
kernel = STAGES["stream_k"].usual_kernel(STAGES["stream_k"].configs[0])
keys = {kernel_key.key(kernel, (9, 0))}
assert "numba" not in sys.modules
import numba.core.config
keys.add(kernel_key.key(kernel, (9, 0)))
import numba.cuda
keys.add(kernel_key.key(kernel, (9, 0)))
numba.core.config.OPT = 0
keys.add(kernel_key.key(kernel, (9, 0)))
print(len(keys))
"""


@pytest.mark.parametrize(("variables", "count"), [({}, 2), ({"NUMBA_CUDA_DEBUGINFO": "0"}, 2)])
def test_a_key_does_not_depend_on_what_was_imported(variables, count):
    source = IMPORTS if not variables else IMPORTS.replace("not in", "in")
    environment = compiler_environment() | variables
    done = subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{count}\n"


CHANGED_LATER = """
import os
from numba_gemm import tiled_sgemm
os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
import numba.cuda
try:
    import numba_gemm.device.store
except RuntimeError as error:
    print(error)
"""


def test_a_simulator_that_was_chosen_too_late_is_refused():
    done = subprocess.run(
        [sys.executable, "-c", CHANGED_LATER], env=compiler_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "numba_gemm was loaded to use a GPU, and Numba was imported later to use the simulator;"
    )
