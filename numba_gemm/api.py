"""The public functions `tiled_sgemm` and `stages`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .gemm import fast_path, product
from .gemm.request import real
from .gemm.stage_table import StageTable
from .kernels import STAGES
from .kernels.stage import IEEE


def stages() -> StageTable:
    """Return the stages of both ladders, in climbing order; `tiled_sgemm` takes their names as `stage`.

    Returns
    -------
    StageTable
        A tuple of stages, printed as a table: name, ladder, precisions, lowest compute capability, and idea.
    """
    return StageTable(STAGES.values())


def tiled_sgemm(
    a: Any,
    b: Any,
    out: Any = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    stage: str = "auto",
    precision: str = IEEE,
    stream: Any = None,
    epilogue: Callable[..., Any] | None = None,
    epilogue_args: Sequence[Any] = (),
) -> Any:
    """Compute ``C = alpha * A @ B + beta * C`` in float32 on the GPU, for matrices or batches of them.

    Parameters
    ----------
    a, b : array of shape (..., M, K), array of shape (..., K, N); float32
        Both of one library: NumPy, Numba, CuPy, PyTorch (on CUDA), or any object that offers
        ``__cuda_array_interface__`` or ``__dlpack__``. Any M, N, K from 0 on, and any strides: transposed, sliced,
        reversed, broadcast. Dimensions before the last two are a batch's, of which each operand may have any number;
        they are broadcast as in NumPy. Arrays in device memory are read where they are, never copied. NumPy arrays are
        copied to the GPU and the result back; one that is not contiguous, with its matrices by rows or by columns, is
        first copied on the host, and a broadcast one in full.
    out : array of shape (..., M, N), float32, optional
        C, of the same library as `a` and `b`, and of the batch dimensions that theirs are broadcast to; overwritten. It
        may have any strides under which its elements are distinct, and may interleave with `a` and `b` in memory as
        long as it shares no element with them. A NumPy one that is not contiguous is filled through a host copy. For
        PyTorch's autograd it counts as modified in place.
    alpha, beta : real number
        Rounded to float32. Where `beta` is 0, C is not read and may hold anything, NaN too; where `alpha` is 0, neither
        `a` nor `b` is read.
    stage : str
        A name in `stages()`, to run that stage, in its first configuration unless it has a schedule; or "auto", to have
        stage and configuration chosen by shape, layout and device, or as `autotune` measured them. `explain` tells what
        is chosen.
    precision : str
        "ieee", float32's multiply-adds, on any GPU; or, from compute capability 8.0 on, how tensor cores are to make do
        with narrower numbers. "bf16x6" and "bf16x9" split each element into three BF16, and have smaller errors than
        float32's own sums, in float32's range: the former from K = 256 on, the latter from 1024 on. "tf32x3" splits it
        into two TF32, and "fp16x3" into two F16 of which each row of A and column of B has a scale: both are less
        accurate for sums of one sign. "tf32" and "bf16" round elements. docs/precision.md says what each guarantees.
        All but "tf32", of most operands, read them once more and need memory for the parts, which each stream keeps.
        "fp32_auto" is the fastest whose stated error and range are no worse than those of "ieee", if no element but 0
        is below 2^-109: "bf16x6" on compute capability 9.0, from K = 256 on and for products large enough that it pays,
        else "ieee".
    stream : optional
        Stream to run on: a stream of Numba, CuPy or PyTorch, an object with ``__cuda_stream__``, or a handle. By
        default the current stream of the arrays' library; for Numba arrays and ``__cuda_array_interface__`` the first
        stream that `a`, `b` or `out` is bound to; else the default stream.
    epilogue : function, optional
        Compiled into the kernel, and applied to each element on its way out: C's element becomes
        ``epilogue(value, row, column, *epilogue_args)``, rounded to float32, where `value` is the element of
        ``alpha * A @ B + beta * C`` and `row` and `column` say where in its matrix it is. A Python function that Numba
        can compile, or one made by ``@cuda.jit(device=True)``. What it finds in globals, closures and modules is
        compiled in as it is at the call, if it is numbers, strings, arrays of up to 64 KB, tuples of these, and
        functions made by ``@cuda.jit`` without signatures that find no more than that. If there is anything else, all
        of it is compiled in as it is at the first call with this very function, and once in every process; Numba's
        simulator, which compiles nothing, sees such contents as they are at each call. Each content is a kernel of its
        own that stays loaded until the process ends: pass numbers that change as `epilogue_args`. Stages without a
        schedule take none.
    epilogue_args : sequence of arrays of shape (elements,), float32
        Vectors for it, of the same library as `a` and `b`, with any strides; not `out`'s memory. It may only read
        them, within their bounds; a GPU checks neither. On Numba's simulator, writing to a read-only array raises
        ValueError.

    Returns
    -------
    array of shape (..., M, N), float32
        `out` if given, else a new array of the library of `a` and `b`, in row order; a Numba device array if `a` and
        `b` are known by ``__cuda_array_interface__`` or ``__dlpack__`` only. (DLPack objects in host memory count as
        NumPy arrays.) A NumPy result is complete at the return; others are complete in the order of the stream.

    Raises
    ------
    TypeError
        For an operand that is no array, has another dtype than float32 (nothing is cast silently), is not of the same
        library as the others, or has no memory of its own (PyTorch's fake and meta tensors, for example); for an
        `alpha`, `beta` or `stream` that is none; for an epilogue that is no function, does not take these arguments,
        does not compile, or returns no real number; for `epilogue_args` that are no sequence.
    ValueError
        For shapes that do not fit; an `out` that is read-only, overlaps `a`, `b`, a vector or itself; ``beta != 0``
        without `out`; operands on several devices; a PyTorch tensor that requires grad while grad mode is enabled, or
        has a forward-mode tangent; an unknown stage, or one that the GPU cannot run, or that takes no epilogue; vectors
        without an epilogue; with one, a K beyond 2**30; an unknown precision, one that the GPU cannot run, or one
        that the stage does not compute in; another than "ieee" with a K beyond 2**30.
    GpuUnavailable
        Without a GPU, unless Numba's simulator is on (NUMBA_ENABLE_CUDASIM=1).

    Notes
    -----
    The product runs on the device that holds the operands (NumPy's: on the current one), and the current device stays
    as it was. It waits, on the GPU, for the work sent so far to the stream that the operands' library works on, or
    that they name. Operands on another stream than their library's, or known by a protocol only, are kept alive until
    the stream has passed the product, and let go by a later call. While the stream is captured into a CUDA graph,
    neither is done: the graph's owner orders and keeps them. Calls are safe from several host threads.

    A call like an earlier one (the same library, shapes, strides, device and stage, no epilogue) skips what the earlier
    one checked.

    A batch is one launch of a stage that has a schedule if its dimensions come down to three: those of extent 1 do not
    count, neighbours that lie behind each other in all operands count as one, and without an epilogue, matrices that
    share B and lie behind each other in A and C count as one matrix; and likewise those that share A. Of more than
    three, the outermost take a launch each; precisions other than "ieee" take one dimension of the three at a time.
    Stages without a schedule take a launch for each matrix that is left.
    """
    if type(alpha) is not float:
        alpha = real("alpha", alpha)
    if type(beta) is not float:
        beta = real("beta", beta)
    tag = fast_path.tag_of(stage, precision, epilogue, epilogue_args)
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
    )
