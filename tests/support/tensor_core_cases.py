"""Kernels of the tensor-core ladder for tests: their precisions, error bounds, products on a GPU, and compiled code.

As a program with ``--run`` it runs every stage once on a GPU of compute capability 9.0, for compute-sanitizer.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from typing import Any

from numba_gemm.kernels.product import Batch, Product, dense
from numba_gemm.kernels.stage import Gpu, Partition, Stage
from numba_gemm.kernels.step import Kernel, Scalar, Step
from numba_gemm.kernels.tensor_core import (
    SHORT_SUMS,
    TENSOR_PRECISIONS,
    TENSOR_STAGES,
    TensorStage,
    TensorVariant,
)
from numba_gemm.kernels.tensor_core.config import NARROW
from numba_gemm.kernels.tensor_core.stage import LONG_SUM
from numba_gemm.kernels.tensor_core.tma_stage import TmaVariant
from numba_gemm.runtime import compilation, epilogue
from numba_gemm.runtime.matrix import Matrix

TMA = TENSOR_STAGES["tf32_tma"]
PERSISTENT = TENSOR_STAGES["persistent"]
TF32 = TENSOR_PRECISIONS["tf32"]

CC = (9, 0)
GPU = Gpu(CC, 132)
ALL_PRECISIONS = TENSOR_PRECISIONS | {short.name: short for short in SHORT_SUMS.values()}
PUBLIC_NAMES = {short.name: name for name, short in SHORT_SUMS.items()}  # of the short sums'

KEPT = ("one_warpgroup", "bulk_copies", "producer_consumer", "wide_tiles")  # stages whose sums stay in tensor cores
STEPS = 4  # matrix instructions per product of parts and slot
CUT = 2.0**-23  # of a sum, that an addition in the tensor cores cuts off at most

# Precisions in which the teaching stages are compiled, and two further kernels.
COMPILED = ("tf32x3", "bf16x6")
COMPILED_TOO = (("one_warpgroup", "tf32"), ("fresh_sums", "bf16x9"))
# How operands that tensor maps describe lie to k; further configurations have the first one alone.
TMA_WAYS = ("across", "across pairs", "along", "along pairs")


def public_name(precision: str) -> str:
    """Return the precision to ask for, by the name of a record of `ALL_PRECISIONS`."""
    return PUBLIC_NAMES.get(precision, precision)


def precisions_of(name: str, index: int) -> list[str]:
    """Return the names of the precisions that a stage computes in with its configuration of this index."""
    stage = TENSOR_STAGES[name]
    names = [*stage.precisions]
    if isinstance(stage, TensorStage) and stage.complete:
        names += PUBLIC_NAMES
    return [
        precision
        for precision in names
        if stage.configs[index].BN <= 128 or len(ALL_PRECISIONS[precision].products) == 1
    ]


def compiled_ways(name: str, index: int) -> list[str]:
    """Return the precisions, or the ways that operands lie, in which the tests compile a configuration of a stage."""
    found, stage = precisions_of(name, index), TENSOR_STAGES[name]
    if stage is TMA:
        return [*TMA_WAYS[: 2 if index else None]]
    if isinstance(stage, TensorStage) and stage.complete:
        return found
    return [precision for precision in found if precision in COMPILED or (name, precision) in COMPILED_TOO]


def bound(stage: str, precision: str, k: int) -> float:
    """Return the largest error of a stage in an element of ``A @ B``, in units of ``abs(A) @ abs(B)``.

    It is the precision's own error and what the additions of the stage cut off or round: all of them if its sums stay
    in the tensor cores; in `fresh_sums`, those of a slot's leading products, and one per slot.
    """
    from numba_gemm.models.accuracy import tensor_bound

    tensor_precision = TENSOR_PRECISIONS[precision]
    slots = -(-k // tensor_precision.slot_k)
    additions = 0
    if stage in KEPT:
        additions = STEPS * len(tensor_precision.products) * slots
    elif stage == "fresh_sums":
        additions = STEPS + slots
    return tensor_bound(precision, k) + additions * CUT


# --------------------------------------------------------------------------------------------------- compiled kernels


def gelu(value: Any, row: Any, column: Any, bias: Any) -> Any:
    """An epilogue that keeps loops of many turns around it from being unrolled."""
    return 0.5 * value * (1 + math.erf(value * 0.7071067811865476)) + bias[column]


def stage_kernel(name: str, index: int, precision: str, rows: str = "") -> Kernel:
    """Return the kernel that multiplies decomposed operands, or rows that are not, with an access."""
    stage = TENSOR_STAGES[name]
    assert isinstance(stage, TensorStage)
    configs = stage.narrow_configs if rows == NARROW else stage.configs
    return stage.kernel_of(configs[index], TensorVariant(ALL_PRECISIONS[precision], rows=rows))


def steps_of(stage: Stage, precision: str, batched: bool = False, gpu: Gpu = GPU) -> tuple[Step, ...]:
    """Return the launches of a long product by a stage in its first configuration."""
    batch = Batch((1, 1, 2), *((0, 0, 1 << 20),) * 3) if batched else Batch()
    product = Product(dense("N", 64, LONG_SUM), dense("N", LONG_SUM, 64), dense("N", 64, 64), batch)
    return stage.launches(stage.configs[0], product, precision, None, gpu).steps


def kernels_of(precision: str, batched: bool = False, gpu: Gpu = GPU) -> list[Kernel]:
    """Return the kernels of a product by `persistent`: row maxima of a scaled precision, decomposition, product."""
    return [step.kernel for step in steps_of(PERSISTENT, precision, batched, gpu)]


def passed(step: Step) -> list[str]:
    """Return the types of the words that a launch passes to its kernel, as PTX names them."""
    return ["f32" if isinstance(one, Scalar) else "u64" for one in step.arguments for _ in one.words]


def taken(ptx: str) -> list[str]:
    """Return the types of a kernel's parameters in PTX."""
    _, _, entry = ptx.partition(".entry")
    return re.findall(r"\.param\s+(?:\.align \d+ )?\.(\w+)", entry[: entry.index(")")])


def epilogue_kernel() -> Kernel:
    """Return the kernel of the precision that has the most registers in use, with `gelu`."""
    variant = TensorVariant(TENSOR_PRECISIONS["bf16x6"], epilogue.prepared(gelu, 1), 1)
    return PERSISTENT.kernel_of(PERSISTENT.configs[0], variant)


def adding_step() -> Step:
    """Return the launch that adds partial sums."""
    product = Product(dense("N", 64, LONG_SUM), dense("N", LONG_SUM, 64), dense("N", 64, 64))
    return PERSISTENT.launches(PERSISTENT.configs[0], product, "fp16x3", Partition(2, 0), GPU).steps[-1]


def tma_kernel(index: int, way: str) -> Kernel:
    """Return the kernel for operands that tensor maps describe."""
    along, pairs = way.startswith("along"), way.endswith("pairs")
    return TMA.kernel_of(TMA.configs[index], TmaVariant(TensorVariant(TF32), along, pairs=pairs))


def compiled_part(part: str) -> Iterator[tuple[dict[str, Any], Kernel, tuple[int, int]]]:
    """Yield descriptions, kernels and compute capabilities of a part.

    It is "others", or a stage, the index of a configuration, a precision or a way, and an access to rows that are not
    decomposed: "persistent:0:bf16x6".
    """
    if part == "others":
        yield {"stage": "row maxima"}, kernels_of("fp16x3")[0], CC
        for step in steps_of(PERSISTENT, "fp16x3", batched=True):
            yield {"stage": "batched", "precision": "fp16x3", "passed": passed(step)}, step.kernel, CC
        yield {"stage": "epilogue"}, epilogue_kernel(), CC
        adds = adding_step()
        yield {"stage": "add partials", "passed": passed(adds)}, adds.kernel, CC
        steps = {
            step.kernel: step for precision in TENSOR_PRECISIONS for step in steps_of(PERSISTENT, precision)[-2:-1]
        }
        for kernel, step in steps.items():
            yield {"stage": "decompose", "passed": passed(step)}, kernel, CC
        return
    name, index, how, *rows = part.split(":")
    stage = TENSOR_STAGES[name]
    config = (stage.narrow_configs if rows == [NARROW] else stage.configs)[int(index)]
    described = {"stage": name, "claim": config.claim, "consumers": getattr(config, "consumers", 0)}
    if stage is TMA:
        (step,) = steps_of(TMA, "tf32")
        described |= {"way": how, "BM": config.BM, "passed": passed(step)}
        yield described, tma_kernel(int(index), how), CC
    else:  # for the oldest GPU that has its instructions
        words = passed(steps_of(stage, stage.precisions[-1])[-1])  # the same in all precisions and configurations
        yield described | {"precision": how, "passed": words}, stage_kernel(name, int(index), how, *rows), stage.min_cc


def compiled_rows(part: str) -> list[dict[str, Any]]:
    """Compile a part where there is a compiler, and describe its kernels."""
    from numba_gemm.inspect import report, sass

    rows = []
    for described, kernel, cc in compiled_part(part):
        cubin = compilation.compile_kernel(kernel, cc)
        found = sass.functions(sass.disassemble(cubin.code))
        (own,) = report.kernels_own(found)
        row = {
            "name": cubin.name,
            "registers": cubin.registers,
            "local": cubin.local,
            "spills": cubin.spill_stores + cubin.spill_loads,
            "log": cubin.log,
            "taken": taken(cubin.ptx),
            "opcodes": sass.instruction_mix(found[own]),
        }
        rows.append(described | row)
    return rows


def first_uses_of_c(part: str) -> dict[str, list[str]]:
    """Return, by the width of the loads, the PTX instructions that first use elements of C in a part's kernel."""
    ((_, kernel, cc),) = compiled_part(part)
    lines, found = compilation.compile_kernel(kernel, cc).ptx.splitlines(), dict[str, list[str]]()
    for i, line in enumerate(lines):
        loaded = re.match(r"\s*ld\.global(\.v2)?\.f32\s+\{?([^\[]*?)\}?, \[", line)
        for register in re.findall(r"%f\d+", loaded[2]) if loaded else ():
            using = next(later for later in lines[i + 1 :] if re.search(rf"{register}\b", later))
            found.setdefault(loaded[1] or "", []).append(using.split()[0])
    return found


def compiled_fused(index: int, precision: str, cc: tuple[int, int]) -> list[dict[str, Any]]:
    """Compile a configuration of `fused_decomposition` for vectors, and for single floats with an epilogue."""
    from numba_gemm.inspect import sass

    stage, rows = TENSOR_STAGES["fused_decomposition"], []
    for aligned in (True, False):
        a, b, c = dense("N", 64, LONG_SUM), dense("N", LONG_SUM, 64), dense("N", 64, 64)
        product = Product(a, b, c)
        if not aligned:
            own = epilogue.prepared(gelu, 1)
            product = Product(a._replace(offset=4), b._replace(offset=4), c, Batch(), own, ((64, 4),))
        (step,) = stage.launches(stage.configs[index], product, precision, None, GPU).steps
        cubin = compilation.compile_kernel(step.kernel, tuple(cc))
        (instructions,) = sass.functions(sass.disassemble(cubin.code)).values()
        rows.append(
            {
                "name": cubin.name,
                "vectors": aligned,
                "local": cubin.local,
                "spills": cubin.spill_stores + cubin.spill_loads,
                "passed": passed(step),
                "taken": taken(cubin.ptx),
                "opcodes": sass.instruction_mix(instructions),
                "widths": [[name, bits] for name, bits in sass.access_widths(instructions)],
            }
        )
    return rows


# --------------------------------------------------------------------------------------------------- products on a GPU


def address(array: Any) -> int:
    """Return the address of a device array."""
    return int(array.__cuda_array_interface__["data"][0])


def matrix(array: Any) -> Matrix:
    """Return a 2-D device array of Numba's as the launcher takes it."""
    return Matrix(address(array), *array.shape, *array.strides, 0, array)


def tensor_matrix(tensor: Any) -> Matrix:
    """Return a 2-D tensor of PyTorch's, in float32 or bfloat16, as the launcher takes it."""
    size = tensor.element_size()
    strides = (size * step for step in tensor.stride())
    return Matrix(tensor.data_ptr(), *tensor.shape, *strides, 0, tensor, "bfloat16" if size == 2 else "float32")


def multiply(
    stage: Any, config: Any, a: Any, b: Any, c: Any, precision: str, alpha: float = 1.0, beta: float = 0.0
) -> None:
    """Compute ``c = alpha * a @ b + beta * c`` for 2-D device arrays, with NaN in the scratch memory beforehand."""
    import numpy as np
    from numba import cuda

    from numba_gemm.runtime.device import get_device, synchronize
    from numba_gemm.runtime.launch import launch, product_of
    from numba_gemm.runtime.workspace import Workspace

    x, y, z = map(matrix, (a, b, c))
    size = stage.launches(config, product_of(x, y, z), precision, None, get_device(0).properties.gpu).scratch_bytes
    memory = cuda.to_device(np.full(max(size // 4, 1), np.nan, np.float32))
    workspace = Workspace(address(memory), size, 0)
    cuda.synchronize()
    launch(stage, config, alpha, x, y, beta, z, precision=precision, workspace=workspace)
    synchronize()


def run_all() -> None:
    """Run every stage in every configuration: two block tiles per side, several slots along k, the last ones partial.

    The stage whose operands tensor maps describe is not among them: `sanitize` has it.
    """
    import numpy as np
    from numba import cuda

    for name, stage in TENSOR_STAGES.items():
        for index, config in enumerate(stage.configs):
            for own in precisions_of(name, index) if isinstance(stage, TensorStage) else ():
                precision, slot_k = public_name(own), ALL_PRECISIONS[own].slot_k
                m, n, k = config.BM + 13, config.BN + 19, 2 * slot_k + 3
                if precision in SHORT_SUMS and own not in PUBLIC_NAMES:
                    k += LONG_SUM
                a, b = (np.random.default_rng(m).standard_normal(size).astype(np.float32) for size in ((m, k), (k, n)))
                c = cuda.to_device(np.full((m, n), np.nan, np.float32))
                multiply(stage, config, cuda.to_device(a), cuda.to_device(b), c, precision)
                error = np.abs(c.copy_to_host() - a.astype(np.float64) @ b) / (np.abs(a.astype(np.float64)) @ np.abs(b))
                correct = error.max() <= bound(name, precision, k)
                print(name, config.name, own, "correct" if correct else "WRONG", flush=True)


if __name__ == "__main__":
    assert sys.argv[1:] == ["--run"]
    run_all()
