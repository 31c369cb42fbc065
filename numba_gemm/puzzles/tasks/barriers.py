"""Place barriers where they are needed, and nowhere else.

Y = A @ X for a vector X: block number `row` computes `y[row]`. Its 64 threads leave 64 partial sums in shared memory,
which are then added up in steps: 32 threads add the upper half to the lower half, then 16 threads, and so on, until
`partial[0]` is the sum of all.

The kernel is complete but for its barriers, `cuda.syncthreads()`. If two threads access the same element of shared
memory, at least one of them writes, and no barrier stands between the two, the result depends on who comes first: a
race. Every thread of the block must reach every barrier. Barriers cost time, so 6 must do, one per step.
"""

from numba import cuda, float32

from ..record import Puzzle

T = 64  # threads of a block


@cuda.jit
def barriers(a, x, y):
    partial = cuda.shared.array(T, float32)
    row = cuda.blockIdx.x
    t = cuda.threadIdx.x
    acc = float32(0)
    for p in range(t, a.shape[1], T):
        acc += a[row, p] * x[p]
    partial[t] = acc
    half = T // 2
    while half > 0:
        # begin
        #:
        cuda.syncthreads()
        # end
        if t < half:
            partial[t] += partial[t + half]
        half //= 2
    if t == 0:
        y[row] = partial[0]


PUZZLE = Puzzle(
    idea="barriers, races",
    shapes={"a": "M, K", "x": "K", "y": "M"},
    grid="M",
    block="64",
    cases=({"M": 2, "K": 64}, {"M": 1, "K": 100}),
    limits={"global_floats": "2*M*K", "barriers": "6"},
    expected=lambda a, x, y: a @ x,
    hints=(
        "Thread 0 reads partial[32]. Who wrote it, and where? A barrier has to stand between that line and the read, "
        "in the first step as in all others.",
        "All 64 threads must reach a barrier, so it cannot stand under `if t < half:`.",
        "One barrier at the top of the while loop orders both: the sums written before the loop, and those of the step "
        "before. Thread 0 itself wrote the final partial[0], and needs no barrier to read it.",
    ),
)
