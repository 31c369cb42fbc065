"""Matrices that a warp stores from its registers; run as a program, it prints what the compiler makes of a kernel."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

NUMBERS = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)  # block, row, column
STORES = {"store4": NUMBERS, "store4_transposed": NUMBERS.transpose(0, 2, 1)}


def kernel_of(store):
    """Each lane's four words by `store` to shared memory, all of which goes to `out`; then those that it loads back."""
    from numba import cuda, float32, uint32

    from numba_gemm.device import mma, stmatrix
    from numba_gemm.device.address import shared_address

    put = getattr(stmatrix, store)

    @cuda.jit
    def kernel(words, out, again):
        tile = cuda.shared.array(128, float32, alignment=16)
        lane = uint32(cuda.threadIdx.x)
        row = uint32(shared_address(tile) + uint32(16) * lane)
        put(row, (words[0, lane], words[1, lane], words[2, lane], words[3, lane]))
        cuda.syncthreads()  # all rows are written before any is read
        for q in range(4):
            out[q, lane] = tile[uint32(32) * uint32(q) + lane]
        found = mma.load4(row)
        for q in range(4):
            again[q, lane] = found[q]

    return kernel


def held(numbers):
    """The words of four blocks as lanes hold them: lane l word l % 4 of row l // 4."""
    return np.ascontiguousarray(numbers).reshape(4, 64).view(np.uint32)


def test_the_simulator_says_that_it_has_none():
    from numba_gemm.device import stmatrix
    from numba_gemm.simulator.switch import SIMULATOR

    if not SIMULATOR:
        pytest.skip("on a GPU there is one")
    for store in STORES:
        with pytest.raises(NotImplementedError, match="no matrix instructions"):
            getattr(stmatrix, store)(0, (0, 0, 0, 0))


def test_it_is_one_instruction():
    from compile_stages import compiler_environment

    command = [sys.executable, __file__]
    done = subprocess.run(command, env=compiler_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == set(STORES)
    for store, row in found.items():
        stored = [opcode for opcode in row["opcodes"] if opcode.startswith("STSM")]
        assert len(stored) == 1, store
        assert (".MT88" in stored[0]) == (store == "store4_transposed"), stored
        assert stored[0].endswith("4"), stored
        assert sum(opcode.startswith("LDSM") for opcode in row["opcodes"]) == 1, store
        assert row["local"] == 0


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("store", STORES)
def test_blocks_lie_in_shared_memory(store):
    from numba import cuda

    out, again = cuda.to_device(np.zeros((4, 32), np.float32)), cuda.to_device(np.zeros((4, 32), np.uint32))
    kernel_of(store)[1, 32](cuda.to_device(held(NUMBERS)), out, again)
    lying = out.copy_to_host().view(np.uint16).reshape(4, 8, 8)
    np.testing.assert_array_equal(lying, STORES[store])
    np.testing.assert_array_equal(again.copy_to_host(), held(STORES[store]))


def main():
    from numba.cuda import types

    from numba_gemm.inspect import sass
    from numba_gemm.runtime.compiler import compile_cubin

    signature = (types.uint32[:, ::1], types.float32[:, ::1], types.uint32[:, ::1])
    found = {}
    for store in STORES:
        made = compile_cubin(kernel_of(store), signature, (9, 0), name=store)
        (instructions,) = sass.functions(sass.disassemble(made.code)).values()
        opcodes = [instruction.opcode for instruction in instructions]
        found[store] = {"local": made.local, "opcodes": opcodes}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
