"""PyTorch's CUDA tensors. PyTorch is not imported here; a caller with such tensors has imported it."""

# ruff: noqa: D102 -- ArrayKind documents the methods

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any

from ..device.units import FLOAT32_BYTES
from ..kernels.product import DTYPES
from .operand import ArrayKind, Operand, imported
from .probe import Alike, Probe, Reading, typed
from .streams import Stream

NAMES = {f"torch.{name}": name for name in DTYPES}  # others keep PyTorch's spelling, in the message that refuses them


class TorchTensors(ArrayKind):
    """PyTorch CUDA tensors, on the stream that is current in PyTorch."""

    name = "PyTorch tensor"
    cast = "{0}.to(torch.float32)"

    def __init__(self) -> None:
        self._are_plain: Callable[[Any, Any, Any], bool] | None = None

    def owns(self, array: Any) -> bool:
        return isinstance(array, imported("torch", "Tensor"))

    def owns_type(self, own: type) -> bool:
        return True

    def describe(self, name: str, array: Any, stream: Stream | None) -> Operand:
        torch: Any = sys.modules["torch"]
        if self._are_plain is None:
            self._are_plain = plain_tensors(torch)
        if (
            self._are_plain(array, array, array)
            and not array.is_nested
            and getattr(torch.autograd.forward_ad, "_current_level", 0) < 0
        ):
            with suppress(RuntimeError):  # no storage, or no strides
                pointer, strides = array.data_ptr(), tuple([4 * step for step in array.stride()])
                if pointer:
                    shape = tuple(array.shape)
                    return Operand(name, self, array, "float32", shape, strides, pointer, array.get_device())
        self.check_has_data(name, array)
        kind, layout = array.device.type, array.layout
        if kind == "cpu":
            raise TypeError(
                f"{name} is a PyTorch tensor on the CPU; expected one on a CUDA device; pass {name}.cuda() to compute "
                f"there, or {name}.detach().numpy() to have it copied there and a NumPy array returned"
            )
        if array.is_nested:
            raise TypeError(
                f"{name} is a nested tensor; expected one whose matrices all have the same shape; pass "
                f"torch.nested.to_padded_tensor({name}, 0.0), or one matrix at a time"
            )
        if kind != "cuda" or layout != torch.strided:
            raise TypeError(
                f"{name} is a PyTorch tensor of layout {layout} on device {array.device}; expected layout "
                f"torch.strided on a CUDA device; pass {name}.{'to_dense()' if kind == 'cuda' else 'cuda()'}"
            )
        if array.is_quantized:
            raise TypeError(f"{name} is a quantized tensor; expected dtype torch.float32; pass {name}.dequantize()")
        pointer = self._address(name, array)
        if array.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} is a PyTorch tensor that requires grad, and grad mode is enabled; no gradient is recorded "
                f"here; call under torch.no_grad() or torch.inference_mode(), or pass {name}.detach()"
            )
        if has_tangent(torch, array):
            raise ValueError(
                f"{name} is a PyTorch tensor with a forward-mode tangent; no derivative is computed here; "
                f"pass {name}.detach()"
            )
        if array.is_neg():
            raise ValueError(
                f"{name} is a PyTorch tensor whose negation is still to be done (is_neg() is True); expected one whose "
                f"memory holds its values; pass {name}.resolve_neg()"
            )
        strides = tuple(step * array.element_size() for step in array.stride())
        shape, device = tuple(array.shape), int(array.device.index)
        word = "float32" if array.dtype is torch.float32 else str(array.dtype)
        return Operand(name, self, array, NAMES.get(word, word), shape, strides, pointer, device)

    @staticmethod
    def check_has_data(name: str, array: Any) -> None:
        """Raise TypeError for a fake or meta tensor, before its address is read."""
        is_fake = isinstance(array, imported("torch._subclasses.fake_tensor", "FakeTensor"))
        if is_fake or array.device.type == "meta":
            raise TypeError(
                f"{name} is a {'fake' if is_fake else 'meta'} tensor, which has no data; expected a tensor on a CUDA "
                "device; pass a real tensor, outside FakeTensorMode"
            )

    @staticmethod
    def _address(name: str, array: Any) -> int:
        try:
            pointer = int(array.data_ptr())
        except RuntimeError:  # inside torch.func's transforms, tensors have no storage
            pointer = 0
        if not pointer and 0 not in array.shape:
            raise TypeError(
                f"{name} is a PyTorch tensor without memory of its own, of type {type(array).__qualname__}, such as a "
                "wrapper subclass, or one inside a torch.func transform; expected a plain tensor; pass the tensor that "
                "it wraps, outside such transforms"
            )
        return pointer

    def streams(self, operands: list[Operand], device: int) -> list[Stream]:
        return [Stream.of(sys.modules["torch"].cuda.current_stream(device))]

    def empty(self, shape: tuple[int, ...], device: int, stream: Stream) -> Operand:
        torch: Any = sys.modules["torch"]
        result = torch.empty(shape, dtype=torch.float32, device=f"cuda:{device}")
        return self.describe("out", result, stream)

    def keep(self, operands: list[Operand], device: int, stream: Stream, followed: list[Stream]) -> None:
        # PyTorch's allocator can be notified; it then waits for that stream before it reuses the memory.
        if not all(map(stream.same, followed)):
            user = self._own_stream(stream, device)
            for operand in operands:
                operand.array.record_stream(user)

    def copy(self, source: Operand, target: Operand, device: int, stream: Stream) -> None:
        torch: Any = sys.modules["torch"]
        # A tensor of inference mode can be written in that mode only; other tensors get another version there, too.
        with torch.inference_mode(), torch.cuda.stream(self._own_stream(stream, device)):
            target.array.copy_(source.array)

    @staticmethod
    def _own_stream(stream: Stream, device: int) -> Any:
        """Return PyTorch's view of a stream."""
        torch: Any = sys.modules["torch"]
        if stream.is_default:
            return torch.cuda.default_stream(device)
        return torch.cuda.ExternalStream(stream.handle, device=device)

    def probe(self, array: Any) -> Probe | None:
        torch: Any = sys.modules["torch"]
        own, usual, halves, float32 = torch.Tensor, plain_tensors(torch), plain_halves(torch), torch.float32
        names = {getattr(torch, name): name for name in DTYPES if hasattr(torch, name)}
        # Not public, but PyTorch's own compiled code calls it; it does not create a Python object for the stream.
        raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # noqa: SLF001
        forward_ad = torch.autograd.forward_ad
        if type(array) is not own or raw_stream is None or not hasattr(forward_ad, "_current_level"):
            return None
        increment: Any = getattr(torch.autograd.graph, "increment_version", None)
        guards: Any = imported("torch._C._dynamo.guards", "TensorGuards") or None

        def read(tag: Any, a: Any, b: Any, out: Any) -> Reading | None:
            if forward_ad._current_level >= 0:  # noqa: SLF001
                return None
            if not usual(a, b, a if out is None else out):
                if not halves(a, b, out):
                    return None
                tag = typed(names, tag, a.dtype, b.dtype)
                if tag is None:
                    return None
            try:
                p, q, device = a.data_ptr(), b.data_ptr(), a.get_device()
                if out is None:
                    r, result = 0, None
                elif out.get_device() == device:
                    r, result = out.data_ptr(), (out.shape, out.stride())
                    if not r:
                        return None
                else:
                    return None
                if not (p and q) or b.get_device() != device:
                    return None
                return (
                    (
                        tag,
                        own,
                        device,
                        (p & 15) << 8 | (q & 15) << 4 | r & 15,
                        a.shape,
                        a.stride(),
                        b.shape,
                        b.stride(),
                        result,
                    ),
                    p,
                    q,
                    r,
                )
            except RuntimeError:  # no storage, or no strides
                return None

        def vector(x: Any, a: Any) -> tuple[int, int, int, int] | None:
            if not usual(x, x, x) or x.dim() != 1:
                return None
            try:
                p = x.data_ptr()
                return (p, x.shape[0], 4 * x.stride()[0], x.get_device()) if p else None
            except RuntimeError:  # no storage, or no strides
                return None

        def stream(a: Any, b: Any, out: Any, device: int) -> int | None:
            return raw_stream(device)

        def empty(a: Any, shape: tuple[int, ...], device: int) -> tuple[Any, int] | None:
            made = a.new_empty(shape) if a.dtype is float32 else a.new_empty(shape, dtype=float32)
            pointer = made.data_ptr()
            return (made, pointer) if pointer else None

        def written(out: Any) -> None:
            if not out.is_inference():
                increment(out)

        def alike(key: Any, a: Any, b: Any, out: Any) -> Alike | None:
            # PyTorch's own compiled code looks at its inputs in this way: their type, dtype, device, shape and strides,
            # whether they require grad while grad mode is enabled, and whether anything else takes part in their use.
            try:
                own = guards(a, b, out, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
            except (TypeError, RuntimeError):  # of another release
                return None
            device, offsets = key[2:4]

            def places(a: Any, b: Any, out: Any) -> tuple[int, int, int, int] | None:
                if not own(a, b, out) or forward_ad._current_level >= 0:  # noqa: SLF001
                    return None
                p, q, r = a.data_ptr(), b.data_ptr(), out.data_ptr()
                if not (p and q and r) or (p & 15) << 8 | (q & 15) << 4 | r & 15 != offsets:
                    return None
                return p, q, r, raw_stream(device)

            return places

        mark = None if increment is None else written
        return Probe(read, vector, stream, empty, mark, alike if guards else None, FLOAT32_BYTES)

    def written(self, out: Operand) -> None:
        # Autograd uses the version to detect that a tensor saved for backward has been written since. Old releases of
        # PyTorch offer no way to increment it; a tensor created in inference mode has none.
        torch: Any = sys.modules["torch"]
        increment = getattr(torch.autograd.graph, "increment_version", None)
        if increment is not None and not out.array.is_inference():
            increment(out.array)

    def version(self, array: Any) -> Hashable:
        # The counter of in-place changes, which all views of a tensor share; a tensor of inference mode has none.
        return array.data_ptr(), None if array.is_inference() else array._version  # noqa: SLF001


def has_tangent(torch: Any, array: Any) -> bool:
    """Return True if a tensor has a forward-mode tangent that the product would drop.

    Below autograd, as inside a dispatch mode, PyTorch computes tangents itself, and no code may read them.
    """
    below = torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)  # noqa: SLF001
    return not below and torch.autograd.forward_ad.unpack_dual(array).tangent is not None


def plain_tensors(torch: Any) -> Callable[[Any, Any, Any], bool]:
    """Return a function that is true of three tensors whose memory holds the float32 numbers of a product's operand.

    It does not look at forward-mode tangents, nor at layouts: tensors that are not strided have no `data_ptr`. It takes
    all operands of a product, since a call for each would take longer.
    """
    own, float32, grad_enabled = torch.Tensor, torch.float32, torch.is_grad_enabled

    def are_plain(x: Any, y: Any, z: Any) -> bool:
        return (
            type(x) is type(y) is type(z) is own
            and x.dtype is y.dtype is z.dtype is float32
            and x.is_cuda
            and y.is_cuda
            and z.is_cuda
            and not ((x.requires_grad or y.requires_grad or z.requires_grad) and grad_enabled())
            and not (x.is_neg() or y.is_neg() or z.is_neg())
        )

    return are_plain


def plain_halves(torch: Any) -> Callable[[Any, Any, Any], bool]:
    """Return the same function of A and B that are not both float32, and a float32 out, or None."""
    own, float32, grad_enabled = torch.Tensor, torch.float32, torch.is_grad_enabled

    def are_plain(a: Any, b: Any, out: Any) -> bool:
        given = (a, b) if out is None else (a, b, out)
        return (
            all(type(x) is own and x.is_cuda and not x.is_neg() for x in given)
            and not (a.dtype is b.dtype is float32)
            and (out is None or out.dtype is float32)
            and not (grad_enabled() and any(x.requires_grad for x in given))
        )

    return are_plain
