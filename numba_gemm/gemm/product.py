"""Compute a product: check it, choose a kernel, launch, and remember the call for the next one like it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from .. import arrays
from ..runtime.device import Device
from ..runtime.workspace import Workspace
from . import fast_path, next_kernels
from .fast_path import CallCache
from .launch_choice import launch_choice
from .precision import IEEE
from .prepare import unwrapped
from .request import Chooser, Request, checked

calls = CallCache(any_extents=True)  # of `tiled_sgemm`
Device.before_compiling = staticmethod(next_kernels.compile_ahead)


def forget() -> None:
    """Remove all cached calls: the next call of each kind is checked in full, and its kernel chosen, again."""
    calls.clear()


def checked_product(
    a: Any,
    b: Any,
    out: Any,
    alpha: float,
    beta: float,
    stream: Any,
    *,
    stage: str,
    cache: CallCache,
    tag: Hashable,
    precision: str | None = IEEE,
    epilogue: Callable[..., Any] | None = None,
    epilogue_args: Sequence[Any] = (),
    home: int | None = None,
    chooser: Callable[[Request], Chooser] | None = None,
    workspace: Workspace | None = None,
    c: Any = None,
) -> Any:
    """Check everything, launch, and remember the call.

    Parameters
    ----------
    a, b, out, alpha, beta, stream, stage, precision, epilogue, epilogue_args
        Those of `tiled_sgemm`; a and b may be prepared.
    cache : CallCache
        Cache in which the call is remembered.
    tag : hashable or None
        The call's `fast_path.tag_of`; None if the call is not to be remembered.
    home : int, optional
        Device for operands in host memory. By default the current one.
    chooser : callable, optional
        Returns the chooser for a request, or raises. By default `Request.choose`.
    workspace : Workspace, optional
        Memory for the launches. By default the stream's.
    c : array, optional
        That of `tiled_sgemm`; then the call is not to be remembered.
    """
    held = unwrapped(a, b, stage, precision, epilogue)
    parts: tuple[Any, ...] = ()
    key = tag  # of the cached call
    if held is not None:
        a, b, precision, parts = held.a, held.b, held.precision, held.parts
        if tag is not None:
            tag = fast_path.tag_of(stage, precision, epilogue, epilogue_args)
            key = (tag, held.prepared) if parts else tag
            done = fast_path.try_fast(cache, key, a, b, out, alpha, beta, stream, (*epilogue_args, *parts))
            if done is not None:
                return done
    precision, generation = IEEE if precision is None else precision, cache.generation
    request = checked(a, b, out, alpha, beta, stream, stage, epilogue, epilogue_args, home, precision, c)
    if held is not None:
        request = held.of(request)
    choose = request.choose if chooser is None else chooser(request)
    left = request.a
    memory = workspace if request.precision == precision else None  # for sums without terms it may be too small
    launched: list[fast_path.Launched] = []
    with left.kind.product(
        left,
        request.b,
        request.out,
        shape=request.shape,
        vectors=request.vectors,
        reads_out=request.beta != 0,
        device=request.device,
        stream=request.stream,
        addend=request.addend,
    ) as placed:
        queue, bases = placed.stream.handle, (placed.a.pointer, placed.b.pointer, placed.c.pointer)
        for part in request.parts(placed.a, placed.b, placed.c, placed.vectors):
            steps = [x.pointer - base for x, base in zip((part.a, part.b, part.c), bases, strict=True)]
            choice, operands = choose(part.product), (request.alpha, part.a, part.b, request.beta, part.c)
            multiplied = part.product
            if choice.precision != request.precision:  # which has other parts than prepared operands
                multiplied = multiplied._replace(prepared=(False, False))
            done = launch_choice(multiplied, choice, *operands, queue, part.vectors, memory)
            launched += [(bound, steps[0] + x, steps[1] + y, steps[2] + z, first) for bound, x, y, z, first in done]
        if tag is not None and request.k and tag == fast_path.tag_of(stage, precision, epilogue, epilogue_args):
            given = a, b, out, (*epilogue_args, *parts)
            placement = placed.a, placed.b, placed.c, placed.vectors
            fast_path.remember(cache, key, left.kind, given, placement, request, launched, generation)
    return arrays.returned(left, placed, request.device) if out is None else out
