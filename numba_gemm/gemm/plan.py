"""Products of fixed extents, with everything but the operands' addresses decided beforehand."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

from .. import arrays
from ..arrays import ITEM, Seen
from ..kernels.ladder.stage import TileConfig
from ..kernels.tensor_core import MODES, direct
from ..kernels.tensor_core.stage import TensorConfig
from ..runtime import launch
from ..runtime import workspace as workspaces
from ..runtime.driver import device_scope
from ..runtime.launch import Matrix
from ..runtime.workspace import ALIGNMENT, Workspace
from . import autotune_cache, direct_products, heuristics, product, request, split_products
from .heuristics import Choice
from .split_products import IEEE

LAYOUTS = ("NN", "NT", "TN", "TT")


def plan(
    m: int,
    n: int,
    k: int,
    *,
    like: Any = None,
    device: int | None = None,
    stage: str = "auto",
    layout: str = "NN",
    precision: str = IEEE,
    workspace: Any = None,
) -> Plan:
    """Decide how to compute ``C = alpha * A @ B + beta * C`` for one triple of extents; compile and load the kernel.

    A plan keeps to its decision, whatever `autotune` finds out later.

    Parameters
    ----------
    m, n, k : int
        Extents of A (m, k), B (k, n) and C (m, n), in elements; from 0 on.
    like : array, optional
        An array on the device to plan for.
    device : int, optional
        The ordinal of that device. By default the current one.
    stage : str
        As for `tiled_sgemm`.
    layout : str
        How A and B will mostly lie in memory: a letter each, "N" by rows, "T" by columns (a transpose of what lies by
        rows). It says for which operands the stage is chosen and the kernel compiled. Others are computed rightly too,
        by the same stage: its kernel for them is compiled at the first call that passes such.
    precision : str
        As for `tiled_sgemm`.
    workspace : array of shape (elements,), float32, optional
        Contiguous device memory of at least `Plan.workspace_bytes` bytes, which the plan keeps and writes: then its
        calls must follow each other, on one stream. By default every stream has one, made when it is first needed.

    Returns
    -------
    Plan
        To be called with arrays.

    Raises
    ------
    TypeError, ValueError
        For arguments that are none of these; for a stage that is unknown, or that the GPU cannot run.
    GpuUnavailable
        As for `tiled_sgemm`.
    """
    m, n, k = _extent("m", m), _extent("n", n), _extent("k", k)
    for name, shape in {"a": (m, k), "b": (k, n), "out": (m, n)}.items():
        request.check_size(name, shape)
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; expected one of {', '.join(LAYOUTS)}; pass one of these")
    if not isinstance(stage, str):
        raise TypeError(f"stage is a {type(stage).__qualname__}; expected a str; pass 'auto' or the name of a stage")
    if stage != "auto":
        heuristics.resolve(stage, request.ANY_GPU)
    request.check_precision(precision, stage)
    return Plan(m, n, k, _place(like, device), stage, layout, workspace, precision)


def _extent(name: str, value: Any) -> int:
    try:
        extent = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is a {type(value).__qualname__}; expected an int; pass int({name})") from None
    if extent < 0:
        raise ValueError(f"{name} is {extent}; expected 0 or more; pass the extent of an array")
    return extent


def _place(like: Any, device: Any) -> int:
    found = None if like is None else arrays.describe("like", like, None).device
    if device is None:
        return launch.current_device() if found is None else found
    ordinal, count = operator.index(device), launch.device_count()
    if not 0 <= ordinal < count:
        raise ValueError(
            f"device is {ordinal}; expected an ordinal below {count}, the number of GPUs; pass one of these"
        )
    if found not in (None, ordinal):
        raise ValueError(
            f"like lies on device {found} and device is {ordinal}; expected one device; pass one of the two"
        )
    return ordinal


class Plan:
    """A product of fixed extents on one device; made by `plan`, safe from several host threads.

    Attributes
    ----------
    m, n, k : int
        Extents in elements.
    device : int
        Ordinal of the device.
    stage : str
        Name of the stage that runs.
    config : TileConfig, WarpgroupConfig or WarpConfig
        Its configuration.
    precision : str
        Of the arithmetic; not "fp32_auto", but what it stands for.
    layout : str
        What the plan was made for.
    grid, block : tuple of int
        Blocks of a launch, and threads of a block, along x, y and z.
    workspace_bytes : int
        Device memory that a launch needs beside the operands, at the most.
    """

    def __init__(
        self, m: int, n: int, k: int, device: int, stage: str, layout: str, memory: Any, precision: str = IEEE
    ) -> None:
        self.m, self.n, self.k, self.device, self.layout = m, n, k, device, layout
        self.precision = split_products.resolved(precision, m, n, k, launch.device_properties(device).cc)
        self.config: TileConfig | TensorConfig
        self._choice: Choice | None  # None: the mode's kernel, and for sums without terms what is best for them
        self._memory = memory  # keeps it alive
        self._seen: Seen = {}
        needed = self._plan_stage(stage) if self.precision == IEEE else self._plan_mode()
        self.workspace_bytes = workspaces.total_bytes(*needed)
        self._workspace = None if memory is None else self._given(memory, *needed)

    def _plan_mode(self) -> tuple[int, int]:
        """Decide, compile and load for a mode of the tensor cores; bytes and counters that are needed."""
        gpu = launch.device_properties(self.device)
        split_products.check_precision(self.precision, gpu.cc)
        self._stage, self._choice = "auto", None
        m, n = max(self.m, 1), max(self.n, 1)
        stage = split_products.stage_on(self.device)
        division = split_products.divide(MODES[self.precision], m, n, self.k, gpu.sm_count, stage=stage)
        a, b = self._dense(self.layout[0], m, max(self.k, 1)), self._dense(self.layout[1], max(self.k, 1), n)
        found = direct_products.arrange(a, b, gpu.cc) if self.precision == direct.MODE.name else None
        if found is None:
            split_products.prepare(division, self.device)
            self.stage, self.config, blocks = stage.name, division.config, division.blocks
        else:
            config = direct_products.choose(found, gpu.sm_count)
            direct_products.prepare(config, found.letters, self.device)
            self.stage, self.config, blocks = "direct", config, direct_products.blocks(found, config, gpu.sm_count)
        self.grid, self.block = (blocks, 1, 1), (self.config.threads, 1, 1)
        return division.workspace_bytes, 0  # which other operands than those that were planned for may need

    def _plan_stage(self, stage: str) -> tuple[int, int]:
        """Decide, compile and load for float32's arithmetic; bytes and counters that are needed."""
        m, n, k, device, layout = self.m, self.n, self.k, self.device, self.layout
        rows, cols = max(m, 1), max(n, 1)  # for a C without elements a kernel is chosen too, and never launched
        a, b, c = self._dense(layout[0], rows, k), self._dense(layout[1], k, cols), self._dense("N", rows, cols)
        wanted = heuristics.problem(a, b, c, launch.PLAIN, launch.device_properties(device))
        choice = autotune_cache.choose(device, wanted) if stage == "auto" else heuristics.named(stage, wanted)
        chosen, config = choice.stage, choice.config
        self.stage, self._stage, self.config = chosen.name, chosen.name, config
        a, b, c, extra = product.arranged(choice, a, b, c, launch.PLAIN)
        launch.prepare(chosen, config, launch.variant_of(chosen, config, a, b, c, extra), device)
        if chosen.schedule is not None and choice.share is None:
            # Once for all layouts: their kernels may differ in how many blocks the device holds.
            choice = replace(choice, share=launch.share_of(chosen, config, a, b, c))
        self._choice = choice
        self.grid, schedule = launch.schedule(chosen, config, a, b, c, choice.share)
        self.block = (*chosen.block(config), 1)
        return (0, 0) if schedule is None else (schedule.workspace_bytes, schedule.counters)

    def _dense(self, layout: str, rows: int, cols: int) -> Matrix:
        strides = (ITEM * cols, ITEM) if layout == "N" else (ITEM, ITEM * rows)
        return Matrix(0, rows, cols, *strides, self.device, None)

    def _given(self, memory: Any, size: int, counters: int) -> Workspace:
        described, elements = arrays.describe("workspace", memory, None), -(-self.workspace_bytes // ITEM)
        if described.dtype != "float32" or len(described.shape) != 1 or described.strides != (ITEM,):
            raise ValueError(
                f"workspace has dtype {described.dtype}, shape {described.shape} and strides {described.strides}; "
                f"expected contiguous float32 of one dimension; pass an array of {elements} elements"
            )
        if described.device not in (None, self.device):
            raise ValueError(
                f"workspace lies on device {described.device} and the plan is for device {self.device}; expected one "
                "device; pass memory of the plan's device"
            )
        room = ITEM * described.shape[0]
        if room < self.workspace_bytes:
            raise ValueError(
                f"workspace has {room} bytes; expected at least {self.workspace_bytes}; "
                f"pass an array of {elements} elements"
            )
        if described.readonly:
            raise ValueError("workspace is read-only; expected memory that can be written; pass another array")
        if described.pointer % ALIGNMENT:
            raise ValueError(
                f"workspace is large enough but starts at address {described.pointer:#x}; expected alignment to "
                f"{ALIGNMENT} bytes; pass a newly allocated device array, not a slice of one"
            )
        made = Workspace(described.pointer, max(size, (room - ITEM * counters) // ALIGNMENT * ALIGNMENT), counters)
        if counters and described.device is not None:
            with device_scope(self.device):
                workspaces.clear(made.words[1], counters, described.kind.streams([described], self.device)[0].handle)
        return made

    def __repr__(self) -> str:
        return (
            f"<Plan m={self.m} n={self.n} k={self.k} device={self.device} layout={self.layout} "
            f"precision={self.precision} stage={self.stage} "
            f"config={self.config.name} grid={self.grid} block={self.block} workspace_bytes={self.workspace_bytes}>"
        )

    def __call__(
        self, a: Any, b: Any, out: Any = None, alpha: float = 1.0, beta: float = 0.0, stream: Any = None
    ) -> Any:
        """Compute ``C = alpha * A @ B + beta * C``.

        Parameters, result and errors are those of `tiled_sgemm`; a ValueError also for operands of other extents than
        the plan's, or on another device.
        """
        if type(alpha) is not float:
            alpha = request.real("alpha", alpha)
        if type(beta) is not float:
            beta = request.real("beta", beta)
        done = arrays.again(self._seen, self.stage, a, b, out, alpha, beta, stream)
        if done is not None:
            return done
        return product.checked_product(
            a,
            b,
            out,
            alpha,
            beta,
            stream,
            stage=self._stage,
            precision=self.precision,
            seen=self._seen,
            home=self.device,
            picking=self._picking,
            workspace=self._workspace,
        )

    def _picking(self, wanted: request.Request) -> request.Pick:
        a, b = wanted.given
        if a != (self.m, self.k) or b != (self.k, self.n):
            raise ValueError(
                f"a has shape {a} and b has shape {b}, and this plan is for shapes ({self.m}, {self.k}) "
                f"and ({self.k}, {self.n}); pass arrays of these shapes, or make another plan"
            )
        if wanted.device != self.device:
            raise ValueError(
                f"operands lie on device {wanted.device} and this plan is for device {self.device}; expected one "
                "device; pass arrays of the plan's device, or make another plan"
            )
        chosen = self._choice
        return wanted.pick if chosen is None else lambda problem: chosen
