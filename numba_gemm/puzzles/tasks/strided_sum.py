"""Let the threads of a block walk along a row together.

Block number `row` adds up row `row` of A, in 32 parts: thread t adds up the elements t, t + 32, t + 64, ... and writes
its sum to `c[row, t]`. In NumPy: `c[row, t] = a[row, t::32].sum()`. In every iteration the 32 threads read 32
neighbours. K need not be a multiple of 32, so some threads have an element more than others, or none.
"""

from numba import cuda, float32

from ..record import Puzzle

T = 32  # threads of a block


@cuda.jit
def strided_sum(a, c):
    row = cuda.blockIdx.x
    t = cuda.threadIdx.x
    k = a.shape[1]
    # begin
    acc = float32(0)
    for p in range(t, k, T):
        acc += a[row, p]
    c[row, t] = acc
    # end


def partial_sums(a, c):
    """NumPy's answer."""
    return [[row[t::T].sum() for t in range(T)] for row in a]


PUZZLE = Puzzle(
    idea="a strided loop over K",
    shapes={"a": "M, K", "c": "M, 32"},
    grid="M",
    block="32",
    cases=({"M": 3, "K": 72}, {"M": 2, "K": 8}, {"M": 1, "K": 128}),
    limits={"global_floats": "M*K", "sectors": "M*(K/8 + 4)"},
    expected=partial_sums,
    hints=(
        "The loop of thread t begins at t, ends before k, and goes on by the number of threads in each iteration.",
        "Python's range does that, and Numba compiles it: `for p in range(t, k, T):`.",
    ),
)
