"""Compilation ahead of need: what is on its way is waited for, whatever becomes of the worker."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace

import pytest

from numba_gemm.kernels import STAGES
from numba_gemm.runtime import ahead, kernel_cache
from numba_gemm.runtime.kernel_key import key

CC = (9, 0)
KERNELS = [stage.kernel_of(stage.configs[0], True) for stage in list(STAGES.values())[:5]]
TASKS = [(kernel, CC) for kernel in KERNELS]


@pytest.fixture
def machine(monkeypatch):
    """Workers without a process: each compiles once the gate opens, unless it is broken. Kept kernels, by name."""
    found = SimpleNamespace(gate=threading.Event(), kept={}, workers=[], begun=[], here=[], ready=True, answers=True)

    class Worker:
        def __init__(self):
            self.stopped = threading.Event()
            found.workers.append(self)

        def wait_until_ready(self):
            if found.ready is None:
                raise OSError("the process has ended")
            return found.ready.wait(60) if isinstance(found.ready, threading.Event) else found.ready

        def compile(self, kernel, cc):
            found.begun.append(kernel)
            assert found.gate.wait(60)
            return f"{kernel.name} elsewhere" if found.answers else None

        def stop(self):
            self.stopped.set()

    def compile_all(tasks, done, jobs):
        for i, (kernel, _) in enumerate(tasks):
            found.here.append(kernel)
            done(i, f"{kernel.name} here", 0.0)

    monkeypatch.setattr(ahead, "_queue", ahead._Queue())
    monkeypatch.setattr(ahead, "start_worker", Worker)
    monkeypatch.setattr(ahead, "default_jobs", lambda: 8)
    monkeypatch.setattr(ahead.kernel_files, "keep", lambda place, name, cubin, *_: found.kept.update({name: cubin}))
    monkeypatch.setattr(ahead.kernel_files, "look_up", lambda place, name: found.kept.get(name))
    monkeypatch.setattr(kernel_cache, "compile_all", compile_all)
    yield found
    found.gate.set()
    until(lambda: not ahead._queue.pending)


def compile_ahead(needed, others=()):
    kernel_cache.compile_ahead(needed, others, CC)


def fetched(tasks=TASKS):
    return [one.cubin for one in kernel_cache.fetch_all(tasks)]


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def begun(machine, count):
    """Wait until workers have begun to compile so many kernels."""
    until(lambda: len(machine.begun) >= count)


def test_kernels_on_their_way_are_waited_for(machine):
    compile_ahead(KERNELS[:2])
    compile_ahead(KERNELS[:2])
    begun(machine, 2)
    threading.Timer(0.1, machine.gate.set).start()
    assert fetched(TASKS[:2]) == [f"{kernel.name} elsewhere" for kernel, _ in TASKS[:2]]
    assert (machine.here, len(machine.workers)) == ([], 2), "8 processes allow for two workers"
    assert not ahead._queue.pending


def test_compilation_ahead_is_logged(machine, caplog):
    caplog.set_level("INFO", logger="numba_gemm")
    machine.gate.set()
    compile_ahead(KERNELS[:1])
    until(lambda: not ahead._queue.pending)
    (record,) = caplog.records
    said = f"kernel {KERNELS[0].name} for compute capability 9.0: compiled ahead of need in "
    assert (record.name, record.getMessage()[: len(said)]) == ("numba_gemm.kernels", said)


def test_kernels_that_no_worker_has_begun_are_compiled_here(machine):
    """Two workers compile; the rest of the queue would wait for them, or for workers that are still starting."""
    compile_ahead(KERNELS)
    begun(machine, 2)
    waiting = [task for task in TASKS if task[0] not in machine.begun]
    assert len(waiting) == 3
    assert fetched(waiting) == [f"{kernel.name} here" for kernel, _ in waiting]
    machine.gate.set()
    others = [task for task in TASKS if task not in waiting]
    assert fetched(others) == [f"{kernel.name} elsewhere" for kernel, _ in others]
    assert not ahead._queue.pending


def test_needed_kernels_come_first(machine, monkeypatch):
    """The worker is busy with the first one; the last ones that were asked for are the next to be needed."""
    monkeypatch.setattr(ahead, "default_jobs", lambda: 4)
    compile_ahead(KERNELS[:1])
    begun(machine, 1)
    compile_ahead(KERNELS[1:2])
    compile_ahead(KERNELS[2:4])
    machine.gate.set()
    until(lambda: not ahead._queue.pending)
    assert machine.begun == [KERNELS[i] for i in (0, 2, 3, 1)]


def test_idle_is_waited_for(machine):
    ahead.wait_until_idle()  # nothing is compiled
    compile_ahead(KERNELS)
    begun(machine, 2)
    waiting = threading.Thread(target=ahead.wait_until_idle)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    machine.gate.set()
    waiting.join(60)
    assert not waiting.is_alive()
    assert set(machine.begun) == set(KERNELS)


@pytest.mark.parametrize(("jobs", "needed", "expected"), [(16, 2, 4), (16, 0, 4), (8, 2, 2), (8, 1, 2), (4, 2, 2)])
def test_others_are_compiled_by_workers_without_work(machine, monkeypatch, jobs, needed, expected):
    monkeypatch.setattr(ahead, "default_jobs", lambda: jobs)
    compile_ahead(KERNELS[:needed], KERNELS[needed:])
    begun(machine, min(expected, jobs // 4))
    compile_ahead([], KERNELS[needed:])  # all workers have work still
    assert set(ahead._queue.pending) == {key(*task) for task in TASKS[:expected]}
    machine.gate.set()
    until(lambda: not ahead._queue.pending)
    assert set(machine.begun) == set(KERNELS[:expected])


def test_needed_kernels_come_before_others_that_wait(machine):
    """Two workers, each about to start; of two others, none has begun when a product needs two kernels more."""
    machine.ready = threading.Event()
    compile_ahead([], KERNELS[:2])
    compile_ahead(KERNELS[2:4])
    machine.gate.set()
    machine.ready.set()
    until(lambda: not ahead._queue.pending)
    assert set(machine.begun[:2]) == set(KERNELS[2:4])
    assert set(machine.begun[2:]) == set(KERNELS[:2])


def test_what_is_kept_is_not_compiled_ahead(machine):
    machine.kept = {key(*task): "known" for task in TASKS}
    compile_ahead(KERNELS)
    assert not machine.workers


@pytest.mark.parametrize(("broken", "value"), [("ready", False), ("ready", None), ("answers", False)])
def test_kernels_that_a_worker_does_not_compile_are_compiled_here(machine, broken, value):
    setattr(machine, broken, value)
    machine.gate.set()
    compile_ahead(KERNELS)
    assert fetched() == [f"{kernel.name} here" for kernel, _ in TASKS]


def test_an_error_leaves_the_kernel_to_whoever_needs_it(machine, monkeypatch):
    """Other kernels are still compiled ahead."""
    keep = ahead.kernel_files.keep

    def failing(place, name, *rest):
        if name == key(*TASKS[0]):
            raise RuntimeWarning("the cache cannot be written")
        keep(place, name, *rest)

    monkeypatch.setattr(ahead.kernel_files, "keep", failing)
    monkeypatch.setattr(ahead, "default_jobs", lambda: 4)
    machine.gate.set()
    compile_ahead(KERNELS)
    until(lambda: not ahead._queue.pending)
    assert set(machine.kept) == {key(*task) for task in TASKS[1:]}
    assert len(machine.workers) == 1


def test_without_workers_kernels_are_compiled_here(machine, monkeypatch):
    monkeypatch.setattr(ahead, "start_worker", lambda: None)
    compile_ahead(KERNELS)
    assert fetched() == [f"{kernel.name} here" for kernel, _ in TASKS]


@pytest.mark.parametrize(("jobs", "workers"), [(1, 0), (3, 0), (4, 1), (16, 4), (200, 4)])
def test_number_of_workers(machine, monkeypatch, jobs, workers):
    monkeypatch.setattr(ahead, "default_jobs", lambda: jobs)
    machine.gate.set()
    compile_ahead(KERNELS)
    fetched()
    until(lambda: len(machine.workers) >= workers)
    assert len(machine.workers) == workers


def test_workers_end_after_some_time_without_work(machine, monkeypatch):
    monkeypatch.setattr(ahead, "IDLE_SECONDS", 0.05)
    machine.gate.set()
    compile_ahead(KERNELS[:1])
    until(lambda: not ahead._queue.pending)
    (worker,) = machine.workers
    assert worker.stopped.wait(60)
    compile_ahead(KERNELS[1:2])
    until(lambda: not ahead._queue.pending)
    assert len(machine.workers) == 2
    assert len(machine.kept) == 2


def test_workers_are_stopped_at_exit(machine):
    machine.gate.set()
    compile_ahead(KERNELS[:1])
    until(lambda: not ahead._queue.pending)
    ahead._queue.stop()
    assert machine.workers[0].stopped.is_set()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:os.fork:RuntimeWarning")  # Python's, JAX's
def test_a_forked_process_waits_for_nothing(machine):
    compile_ahead(KERNELS)
    child = os.fork()
    if child == 0:
        os._exit(0 if fetched() == [f"{kernel.name} here" for kernel, _ in TASKS] else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_without_a_cache_nothing_is_compiled_ahead(machine, monkeypatch):
    monkeypatch.setenv("NUMBA_GEMM_CACHE_DIR", "")
    compile_ahead(KERNELS)
    assert not machine.workers
