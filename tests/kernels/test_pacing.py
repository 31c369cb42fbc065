"""Blocks that keep in step: who waits, who ends, and what is left in the counter."""

import random
import threading
import time
from types import SimpleNamespace

import pytest

from numba_gemm.kernels.stage import Gpu
from numba_gemm.kernels.step import Moving, Slot
from numba_gemm.kernels.tensor_core import pacing
from numba_gemm.kernels.tensor_core.stage import words_of_turns
from numba_gemm.simulator.switch import SIMULATOR

simulated = pytest.mark.skipif(not SIMULATOR, reason="blocks are threads of Python here")


class Blocks:
    """Blocks as threads, with one counter; `lead` is the most slots that one was ahead of the average."""

    def __init__(self, monkeypatch, blocks):
        self.blocks, self.lock, self.counter, self.lead = blocks, threading.Lock(), 0, 0
        self.taken = [0] * blocks
        self.own = threading.local()
        monkeypatch.setattr(pacing, "cuda", SimpleNamespace(gridDim=SimpleNamespace(x=blocks), blockIdx=self.own))
        monkeypatch.setattr(pacing, "add_to_counter", self.add)
        monkeypatch.setattr(pacing, "read_counter", self.read)
        monkeypatch.setattr(pacing, "clear_counter", self.clear)
        pacing.pace.cache_clear()
        monkeypatch.setattr(pacing, "give_back", self.give_back)
        monkeypatch.setattr(pacing, "ring", lambda slots: (self.await_slot, lambda i, parity: (i, parity)))
        self.keep_in_step = pacing.pace(2)

    def add(self, counter, count):
        with self.lock:
            before, self.counter = self.counter, self.counter + int(count)
        return before

    def read(self, counter):
        time.sleep(0.0005)
        return self.counter

    def clear(self, counter):
        self.counter = 0

    def await_slot(self, full, i, parity):
        if self.own.slow:
            time.sleep(random.random() * self.own.slow)

    def give_back(self, empty, i):
        self.taken[self.own.x] += 1
        with self.lock:
            if self.counter:  # not cleared yet; a block without a last tile has counted it at its end
                self.lead = max(self.lead, self.taken[self.own.x] - self.counter * pacing.TURN / self.blocks)

    def run(self, tiles, k_slots, slow, some=None):
        """Run blocks, all or some, of which the first is slow."""

        def block(x):
            self.own.x, self.own.slow = x, slow if x == 0 else 0.0
            whole = -(-tiles // self.blocks) * self.blocks
            self.keep_in_step(1, whole, tiles, k_slots, 0, 0)

        threads = [threading.Thread(target=block, args=(x,)) for x in (range(self.blocks) if some is None else some)]
        for one in threads:
            one.start()
        for one in threads:
            one.join(60)
            assert not one.is_alive()


@simulated
@pytest.mark.parametrize(("tiles", "k_slots"), [(9, 16), (8, 16), (13, 19), (4, 3)])
def test_the_counter_is_cleared_and_no_block_runs_ahead(monkeypatch, tiles, k_slots):
    blocks = Blocks(monkeypatch, 4)
    monkeypatch.setattr(pacing, "POLLS", 1 << 30)
    blocks.run(tiles, k_slots, slow=0.004)
    assert blocks.counter == 0
    assert sum(blocks.taken) == tiles * k_slots
    # A block may be ahead by what it may count, one more turn, and the slots that belong to no turn.
    assert blocks.lead <= (pacing.AHEAD + 1) * pacing.TURN + k_slots % pacing.TURN * -(-tiles // 4)


@simulated
def test_without_waiting_a_block_does_run_ahead(monkeypatch):
    blocks = Blocks(monkeypatch, 4)
    monkeypatch.setattr(pacing, "AHEAD", 1 << 20)
    blocks.run(8, 32, slow=0.004)
    assert blocks.lead > 2 * pacing.TURN + 4
    assert blocks.counter == 0


@simulated
def test_blocks_do_not_wait_for_one_that_has_not_begun(monkeypatch):
    blocks = Blocks(monkeypatch, 4)
    monkeypatch.setattr(pacing, "POLLS", 5)
    blocks.run(8, 32, 0.0, some=range(1, 4))
    assert sum(blocks.taken) == 6 * 32
    assert blocks.counter != 0
    blocks.run(8, 32, 0.0, some=range(1))
    assert blocks.counter == 0


def test_blocks_count_where_each_computes_several_tiles_of_one_matrix():
    gpu = Gpu((9, 0), 132)
    assert words_of_turns(133, 1, gpu) == (Moving(Slot.COUNTERS), 264)
    assert words_of_turns(264, 1, gpu) == (Moving(Slot.COUNTERS), 264)
    assert words_of_turns(132, 1, gpu)[0] == 0
    assert words_of_turns(1000, 2, gpu)[0] == 0
