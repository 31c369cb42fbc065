"""The public functions `tiled_sgemm` and `stages`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .gemm import fast_path, product
from .gemm.stage_table import StageTable
from .kernels import STAGES
from .kernels.scalars import real
from .kernels.stage import IEEE
from .typing import Array, ArrayT, PrecisionName, Scalar, StageChoice

if TYPE_CHECKING:
    from .gemm.prepare import PreparedOperand


def stages() -> StageTable:
    """Return the stages of both ladders, in climbing order; `tiled_sgemm` takes their names as `stage`.

    Returns
    -------
    StageTable
        A tuple of stages, printed as a table: name, ladder, precisions, lowest compute capability, and idea.
    """
    return StageTable(STAGES.values())


def tiled_sgemm(
    a: ArrayT | PreparedOperand[ArrayT],
    b: ArrayT | PreparedOperand[ArrayT],
    out: ArrayT | None = None,
    *,
    alpha: Scalar = 1.0,
    beta: Scalar = 0.0,
    c: Array | None = None,
    stage: StageChoice = "auto",
    precision: PrecisionName | None = None,
    stream: Any = None,
    epilogue: Callable[..., Any] | None = None,
    epilogue_args: Sequence[Any] = (),
) -> ArrayT:
    """Compute ``alpha * A @ B + beta * C`` on the GPU, with a float32 result, for matrices or batches of them.

    Parameters
    ----------
    a, b : array of shape (..., M, K), array of shape (..., K, N); float32, float16 or bfloat16
        Arrays of one library: NumPy, Numba, CuPy, PyTorch (on CUDA), or any object with ``__cuda_array_interface__`` or
        ``__dlpack__``. M, N and K may be 0, and strides are arbitrary: transposed, sliced, reversed, broadcast.
        Dimensions before the last two are batch dimensions, which are broadcast as in NumPy; vectors, of shape (K,),
        are multiplied as by `numpy.matmul`. Arrays in device memory are read in place. NumPy arrays are copied to the
        GPU, and the result back. Operands of 16 bits are converted to float32, which is exact, by a launch before the
        product, in 4 bytes of memory per element, unless a stage reads them as they are; the dtypes of `a` and `b` may
        differ. Either may be an operand that `prepare` returned.
    out : array of shape (..., M, N), float32, optional
        Array of the same library for the result, and C unless `c` is given; it is overwritten. Its elements must be
        distinct and may not be shared with `a` or `b`; strides are arbitrary otherwise. PyTorch's autograd is told that
        it was modified in place.
    alpha, beta : real number
        Scalars, rounded to float32. C is not read if `beta` is 0 and may then hold NaN; `a` and `b` are not read if
        `alpha` is 0.
    c : array of a shape that is broadcast to (..., M, N), float32, optional
        C if it is to be kept, an array of the same library; it is not written. It may share memory with `a` and `b`,
        and with `out` if both are the same array. It is copied to the result first, which takes a pass over memory.
    stage : str
        Name of a stage in `stages()`, or "auto" for the fastest one for these shapes, layouts and this GPU, by a model
        or as `autotune` measured it. `explain` describes the choice.
    precision : str, optional
        Arithmetic of the product; by default that of a prepared operand, else "ieee". "ieee": float32 multiply-adds, on
        any GPU. The others use tensor cores, from compute capability 8.0 on: "bf16x6" and "bf16x9" decompose each
        element into three BF16 numbers and have errors like those of float32 sums or smaller, over float32's range,
        from K = 128 ("bf16x6") and K = 1024 ("bf16x9") on; "tf32x3" (two TF32) and "fp16x3" (two FP16, scaled by row
        and column) are less accurate for sums of one sign; "bf16x3" (two BF16) keeps 16 bits of each element; "tf32"
        and "bf16" round the elements. On 9.0, "bf16x6" also has compensated float32 sums, for small and thin products,
        and "bf16x9" float64 sums, for batches of small matrices.
        A less accurate precision is computed in "bf16x6", or "tf32" and "bf16" in "ieee", if expected to be faster.
        "fp32_auto" is "bf16x6" on 9.0 from K = 128 on, where that is expected to be faster, else "ieee": as accurate
        as "ieee" if no element but 0 is below 2^-109 and sums are well above 2^-126. A named stage computes in its own
        `Stage.precisions` only. Names of JAX, PyTorch and cuBLAS for the same arithmetic are accepted, too. See
        docs/precision.md.
    stream : optional
        Stream to run on: a stream of Numba, CuPy or PyTorch, an object with ``__cuda_stream__``, or a handle. By
        default the current stream of the arrays' library; for Numba arrays and ``__cuda_array_interface__`` the first
        stream that `a`, `b` or `out` is bound to, else the default stream.
    epilogue : function, optional
        Function that is compiled into the kernel and applied to each element of C: ``epilogue(value, row, column,
        *epilogue_args)``, where `value` is an element of ``alpha * A @ B + beta * C``. A Python function that Numba can
        compile, or one made by ``@cuda.jit(device=True)``. Numbers, small arrays, functions and modules that it finds
        in globals and closures are compiled in as they are at the call; pass numbers that change as `epilogue_args`,
        since each content is a kernel of its own that stays loaded. Arrays of more than 64 KB stay as they were at the
        first call; lists and dictionaries do not compile. See docs/how_to/batches_and_epilogues.md.
    epilogue_args : sequence of arrays of shape (elements,), float32
        Vectors for the epilogue, of the same library, with any strides, in other memory than `out`. It may only read
        them, within their bounds; a GPU checks neither.

    Returns
    -------
    array of shape (..., M, N), float32
        Without M if `a` is a vector, and without N if `b` is one: of two vectors, an array of shape (). `out` if given,
        else a new array of the library of `a` and `b`, in row order. For arrays that are known by
        ``__cuda_array_interface__`` or ``__dlpack__`` only, it is made by ``from_dlpack`` of the array namespace or the
        package of `a`; without that function, it is a Numba device array, or NumPy's for operands in host memory. A
        NumPy result is complete at the return; others are complete in the order of the stream.

    Raises
    ------
    TypeError
        For an operand that is not an array, has another dtype than those above (nothing is cast silently), is not of
        the same library as the others, or has no memory of its own (PyTorch's fake and meta tensors, for example); for
        an invalid `alpha`, `beta` or `stream`; for an epilogue that is not a function, does not take these arguments,
        has a raise or assert statement, does not compile, or does not return a real number.
    ValueError
        For shapes that do not fit; an `out` that is read-only, or overlaps `a`, `b`, `c`, a vector or itself;
        ``beta != 0`` without `out` and `c`; operands on several devices; a PyTorch tensor that requires grad while grad
        mode is enabled, or has a forward-mode tangent; an unknown stage or precision, or one that the GPU cannot run; a
        stage that does not compute in the precision, or takes no epilogue; vectors without an epilogue; a K beyond
        2**30 with an epilogue or in another precision than "ieee"; a prepared operand that is passed for the other
        one, in another precision, or after its array has changed.
    GpuUnavailable
        Without a GPU, unless Numba's simulator is on (NUMBA_ENABLE_CUDASIM=1).

    Notes
    -----
    The product runs on the device of the operands (NumPy's: on the current one), after the work sent so far to the
    streams of the operands. Calls are safe from several host threads, and can be captured into CUDA graphs. A call with
    the layouts, stage, precision and epilogue of an earlier one skips what that one checked.

    Examples
    --------
    >>> import numpy as np
    >>> from numba_gemm import tiled_sgemm
    >>> a, b = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)
    >>> tiled_sgemm(a, b)
    array([[3., 3., 3., 3.],
           [3., 3., 3., 3.]], dtype=float32)

    A bias per column and ReLU, in the kernel:

    >>> bias = np.float32([0, -3, -4, 1])
    >>> tiled_sgemm(a, b, epilogue=lambda value, row, column, bias: max(value + bias[column], 0), epilogue_args=(bias,))
    array([[3., 0., 0., 4.],
           [3., 0., 0., 4.]], dtype=float32)
    """
    if type(alpha) is not float:
        alpha = real("alpha", alpha)
    if type(beta) is not float:
        beta = real("beta", beta)
    named = IEEE if precision is None else precision
    tag = fast_path.tag_of(stage, named, epilogue, epilogue_args) if c is None else None
    if tag is not None:
        done = fast_path.try_fast(product.calls, tag, a, b, out, alpha, beta, stream, epilogue_args)
        if done is not None:
            return done
    return product.checked_product(
        a,
        b,
        out,
        alpha,
        beta,
        stream,
        stage=stage,
        precision=precision,
        cache=product.calls,
        tag=tag,
        epilogue=epilogue,
        epilogue_args=epilogue_args,
        c=c,
    )
