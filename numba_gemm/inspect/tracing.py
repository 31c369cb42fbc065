"""Tracing of every memory access of chosen blocks, by running the real kernel on the simulator; needs no GPU.

`trace` runs blocks of a stage, or of any other kernel, and records each access of each thread. Accesses of one warp by
one instruction form a request, as on the hardware: they have the same call stack (code and instruction of each call),
array, iterations of all loops and barrier interval. The cost of a request in sectors and wavefronts follows the
hardware's rules (`numba_gemm.models.requests`). The width of an access is the one that the kernel asks for, with
`load4` and similar functions. A trace does not show what a compiler merges, hoists or removes; docs/tracing.md compares
both on an H200.

One module because `Trace`, nearly all of it, derives every table and every text from the same private rows.
"""

from __future__ import annotations

import inspect
import linecache
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ..device import watch
from ..kernels.ladder import TileConfig
from ..models import requests as rules
from ..simulator import patches
from ..simulator.threads import WARP_SIZE
from . import target
from .races import Race, races, unneeded_barriers
from .recording import COLUMNS, GLOBAL, SHARED, Recorder, TracedArray
from .unwritten import UnwrittenRead, unwritten_reads

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Race", "Trace", "TracedArray", "UnwrittenRead", "trace"]

ALLOCATION = 256  # alignment of device allocations in bytes
OPS = np.array(["load", "store", "copy", "copy", "atomic"], object)  # by kind of access
WRITES = ("store", "atomic")

Pattern = tuple[tuple[int, int], ...]


@lru_cache(maxsize=1 << 16)
def _cost(space: str, op: str, size: int, lanes: Pattern, others: Pattern) -> tuple[int, int]:
    """Return the cost of a request and the lowest possible one; `others` are the other ends of a copy."""
    if space == GLOBAL:
        taken = rules.copy_sectors(lanes, size, dict(others)) if op == "copy" else rules.sectors(lanes, size)
        return taken, rules.fewest_sectors(lanes, size)
    least = rules.fewest_wavefronts(lanes, size, op != "load")
    if op == "copy":
        return rules.copy_wavefronts(lanes, size, dict(others)), least
    return rules.wavefronts(lanes, size, op != "load"), least


def _pattern(lanes: np.ndarray[Any, Any], places: np.ndarray[Any, Any]) -> Pattern:
    """Return lanes and their addresses, relative to the multiple of `ALLOCATION` at or below the lowest address."""
    base = int(places.min()) // ALLOCATION * ALLOCATION if len(places) else 0
    return tuple(zip(lanes.tolist(), (places - base).tolist(), strict=True))


class Trace:
    """Record of the memory accesses of a kernel, as returned by `trace`.

    Attributes
    ----------
    kernel : str
        Name of the kernel.
    grid, block : tuple of int
        Extents of the launch.
    blocks : list of tuple of int
        Indices of the blocks that ran.
    arrays : list of TracedArray
        Arrays that were accessed, and arguments that the kernel never touched.
    """

    def __init__(self, kernel: str, grid: tuple[int, ...], block: tuple[int, ...], recorder: Recorder) -> None:
        self.kernel, self.grid, self.block = kernel, grid, block
        self.blocks, self.arrays = recorder.blocks, recorder.arrays
        self._recorder, self._sites = recorder, recorder.sites
        self._table = np.array(recorder.rows, np.int64).reshape(-1, len(COLUMNS))
        self._file = recorder.file
        self._other = np.full(len(self._table), -1, np.int64)  # for a copy, the row of its other access
        for one, other in recorder.pairs:
            self._other[one], self._other[other] = other, one

    # ---- tables

    def _column(self, name: str) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = self._table[:, COLUMNS.index(name)]
        return found

    def _ops(self) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = OPS[self._column("kind")]
        return found

    def _of_sites(self, what: str) -> np.ndarray[Any, Any]:
        values = np.array([getattr(site, what) for site in self._sites], object)
        return values[self._column("site")] if len(values) else np.array([], object)

    def _of_arrays(self, what: str) -> np.ndarray[Any, Any]:
        values = np.array([getattr(array, what) for array in self.arrays], object)
        return values[self._column("array")] if len(self._table) else np.array([], object)

    @cached_property
    def accesses(self) -> pd.DataFrame:
        """One row per access of each thread, in execution order.

        The columns are ``block`` and ``thread`` (by position, x fastest), ``warp`` and ``lane``; ``line`` in the
        kernel's file, and ``site``, all calls that lead to the access; ``array``, ``space``, ``element`` (the first
        one, as a tuple); ``bytes``, ``op`` (load, store, copy, atomic), ``write`` (bool), and the barrier
        ``interval``.
        """
        import pandas as pd

        elements = np.empty(len(self._table), object)
        for number, array in enumerate(self.arrays):
            chosen = self._column("array") == number
            places = array.indices(self._column("offset")[chosen])
            for i, place in zip(np.flatnonzero(chosen), map(tuple, places.tolist()), strict=True):
                elements[i] = place
        ops = self._ops()
        return pd.DataFrame(
            {
                "block": [self.blocks[i] for i in self._column("block")],
                "thread": self._column("thread"),
                "warp": self._column("thread") // WARP_SIZE,
                "lane": self._column("thread") % WARP_SIZE,
                "line": self._of_sites("line"),
                "site": self._of_sites("text"),
                "array": self._of_arrays("name"),
                "space": self._of_arrays("space"),
                "element": elements,
                "bytes": self._column("size"),
                "op": ops,
                "write": np.isin(ops, WRITES) | (self._column("kind") == watch.COPY_WRITE),
                "interval": self._column("interval"),
            }
        )

    @cached_property
    def requests(self) -> pd.DataFrame:
        """One row per request of a warp.

        The columns are ``block``, ``warp``, ``line``, ``site``, ``array``, ``space``, ``op``, ``bits`` per lane, number
        of active ``lanes``, and total ``bytes``; ``sectors`` for global memory, ``wavefronts`` for shared memory, and
        the fewest of them that suffice, ``ideal``. ``first`` is the row of the request's first access in `accesses`.
        """
        import pandas as pd

        table = self._table
        warps, lanes = np.divmod(self._column("thread"), WARP_SIZE)
        names = ("site", "path", "interval", "array", "size", "kind")
        key = np.stack([self._column("block"), warps, *map(self._column, names)], axis=1)
        _, request = np.unique(key, axis=0, return_inverse=True)
        request = request.reshape(-1)
        # A second access by the same lane with the same key belongs to another request.
        order = np.lexsort((np.arange(len(table)), lanes, request))
        same = np.zeros(len(table), bool)
        same[1:] = (request[order][1:] == request[order][:-1]) & (lanes[order][1:] == lanes[order][:-1])
        run = np.arange(len(table))
        starts = np.maximum.accumulate(np.where(same, 0, run))
        again = np.empty(len(table), np.int64)
        again[order] = run - starts
        _, request = np.unique(np.stack([request, again], axis=1), axis=0, return_inverse=True)
        order = np.lexsort((lanes, request.reshape(-1)))
        request = request.reshape(-1)[order]
        bounds = np.flatnonzero(np.r_[True, request[1:] != request[:-1], True]) if len(table) else np.zeros(1, int)
        ops, lines, texts = self._ops(), self._of_sites("line"), self._of_sites("text")
        rows, groups = [], []
        sizes = self._column("size")
        places = self._column("offset") + self._of_arrays("begin").astype(np.int64)
        for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            members = order[begin:end]
            groups.append(members)
            first = int(members.min())
            array, size = self.arrays[int(self._column("array")[first])], int(sizes[first])
            others = self._other[members]
            copied = others[others >= 0]
            cost, ideal = _cost(
                array.space,
                ops[first],
                size,
                _pattern(lanes[members], places[members]),
                _pattern(lanes[copied], places[copied]),
            )
            rows.append(
                (
                    self.blocks[int(self._column("block")[first])],
                    int(warps[first]),
                    lines[first],
                    texts[first],
                    array.name,
                    array.space,
                    ops[first],
                    8 * size,
                    end - begin,
                    size * (end - begin),
                    cost if array.space == GLOBAL else 0,
                    cost if array.space == SHARED else 0,
                    ideal,
                    first,
                )
            )
        columns = ["block", "warp", "line", "site", "array", "space", "op", "bits", "lanes", "bytes"]
        frame = pd.DataFrame(rows, columns=[*columns, "sectors", "wavefronts", "ideal", "first"])
        order = np.argsort(frame["first"].to_numpy(np.int64), kind="stable")
        self._members = [groups[i] for i in order]
        return frame.iloc[order].reset_index(drop=True)

    @property
    def request_of(self) -> np.ndarray[Any, Any]:
        """Row of `requests` for each row of `accesses`."""
        found = np.empty(len(self._table), np.int64)
        for request in range(len(self.requests)):
            found[self._members[request]] = request
        return found

    @cached_property
    def lines(self) -> pd.DataFrame:
        """Sums over requests, one row per line, array, operation and width, in source order.

        ``per_request`` is the number of sectors, or wavefronts, per request. ``efficiency`` is the ideal number divided
        by the actual one. The ideal is the number of sectors that would hold the same bytes, or of wavefronts without
        bank conflicts.
        """
        keys = ["line", "array", "space", "op", "bits"]
        sums = self.requests.groupby(keys, as_index=False).agg(
            requests=("first", "size"),
            bytes=("bytes", "sum"),
            sectors=("sectors", "sum"),
            wavefronts=("wavefronts", "sum"),
            ideal=("ideal", "sum"),
        )
        cost = sums["sectors"] + sums["wavefronts"]
        sums["per_request"] = cost / sums["requests"]
        sums["efficiency"] = sums["ideal"] / cost
        return sums

    @cached_property
    def traffic(self) -> pd.DataFrame:
        """Bytes per array: requested by lanes, moved in sectors, and the fewest that must move.

        ``read`` and ``written`` are requested by lanes, ``moved`` are those of all sectors, and ``different`` counts
        each sector of global memory, or each element of shared memory, once. Atomics count as writes. Copies count as
        reads of global memory and as writes of shared memory.
        """
        import pandas as pd

        rows = []
        for number, array in enumerate(self.arrays):
            chosen = self._column("array") == number
            own = self.requests[self.requests["array"] == array.name]
            offsets, sizes = self._column("offset")[chosen] + array.begin, self._column("size")[chosen]
            unit = int(sizes.min(initial=array.itemsize))  # smaller than an element in other views of dynamic memory
            pieces = [offsets[sizes > part] + part for part in range(0, int(sizes.max(initial=0)), unit)]
            different = np.unique(np.concatenate([np.array([], np.int64), *pieces]))
            touched = len(np.unique(different // rules.SECTOR_BYTES))
            writes = own["op"].isin(WRITES if array.space == GLOBAL else (*WRITES, "copy"))
            row = {
                "array": array.name,
                "space": array.space,
                "read": int(own[~writes]["bytes"].sum()),
                "written": int(own[writes]["bytes"].sum()),
                "moved": rules.SECTOR_BYTES * int(own["sectors"].sum()),
                "different": rules.SECTOR_BYTES * touched if array.space == GLOBAL else unit * len(different),
            }
            rows.append(row)
        return pd.DataFrame(rows)

    def intensity(self, flops: float) -> dict[str, float]:
        """Return FLOP per byte at each level, given the FLOP that the traced blocks perform.

        The bytes are those of global memory that lanes request ("requested"), those that move in sectors for them
        ("sectors"), those of each sector counted once ("compulsory"), and those of shared memory ("shared").
        """
        own, traffic = self.requests, self.traffic
        outside = own[own["space"] == GLOBAL]
        levels = {
            "requested": float(outside["bytes"].sum()),
            "sectors": float(rules.SECTOR_BYTES * outside["sectors"].sum()),
            "compulsory": float(traffic[traffic["space"] == GLOBAL]["different"].sum()),
            "shared": float(own[own["space"] == SHARED]["bytes"].sum()),
        }
        return {level: flops / moved if moved else float("inf") for level, moved in levels.items()}

    def lanes(self, request: int) -> list[tuple[int, int]]:
        """Return the number of each lane in a row of `requests`, and its byte address within the allocation.

        Raises
        ------
        ValueError
            if there is no such row.
        """
        if not 0 <= request < len(self.requests):
            raise ValueError(f"request is {request}; expected a row of requests, from 0 to {len(self.requests) - 1}")
        members = self._members[request]
        lanes = self._column("thread")[members] % WARP_SIZE
        places = self._column("offset")[members] + self.arrays[int(self._column("array")[members[0]])].begin
        return sorted(zip(lanes.tolist(), places.tolist(), strict=True))

    def touched(self, name: str, op: str = "load") -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return the elements of an array that are accessed, and the accessing threads, in execution order.

        Parameters
        ----------
        name : str
            The array.
        op : str
            "load", "store", "copy" or "atomic".

        Returns
        -------
        indices : array of shape (accesses, dimensions)
            Index of each element; a vector access has several elements.
        threads : array of shape (accesses,)
            The thread's position in its block.

        Raises
        ------
        ValueError
            if there is no such array, or no such access.
        """
        array = self.array(name)
        chosen = (self._of_arrays("name") == name) & (self._ops() == op)
        if not chosen.any():
            made = ", ".join(sorted(set(self._ops()[self._of_arrays("name") == name])))
            raise ValueError(f"{self.kernel} does not {op} {name}; what it does is {made}")
        counts = np.maximum(self._column("size")[chosen] // array.itemsize, 1)
        order = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        offsets = self._column("offset")[chosen][order] + within * array.itemsize
        return array.indices(offsets), self._column("thread")[chosen][order]

    def joined(self, arrays: Sequence[str]) -> tuple[int, int]:
        """Return requests and wavefronts of loads from shared arrays, if the compiler reads four neighbours at once.

        For each lane, any four 32-bit words that form a vector of 128 bits and are read between two barriers are
        combined.

        Raises
        ------
        ValueError
            if the arrays are not read by 32-bit words, or if the words do not form whole vectors, as many in each lane.
        """
        table, ops = self._table, self._ops()
        named = [number for number, array in enumerate(self.arrays) if array.name in arrays and array.space == SHARED]
        chosen = np.isin(self._column("array"), named) & (ops == "load") & (self._column("size") == 4)
        own = table[chosen]
        thread = own[:, COLUMNS.index("thread")]
        key = [own[:, COLUMNS.index(name)] for name in ("block", "array", "interval")]
        places = np.stack([*key, thread // WARP_SIZE, thread, own[:, COLUMNS.index("offset")]], axis=1)
        groups: dict[tuple[int, ...], dict[int, set[int]]] = {}
        for *group, number, offset in np.unique(places, axis=0).tolist():
            groups.setdefault(tuple(group), {}).setdefault(number % WARP_SIZE, set()).add(offset)
        requests = cost = 0
        for lanes in groups.values():
            vectors = {lane: sorted({offset // 16 for offset in offsets}) for lane, offsets in lanes.items()}
            counts = {len(own) for own in vectors.values()}
            if len(counts) > 1 or any(len(offsets) != 4 * len(vectors[lane]) for lane, offsets in lanes.items()):
                raise ValueError(
                    f"{self.kernel} does not read {', '.join(arrays)} by whole vectors, as many in each lane"
                )
            for vector in zip(*vectors.values(), strict=True):
                requests += 1
                cost += rules.wavefronts([(lane, 16 * at) for lane, at in zip(vectors, vector, strict=True)], 16)
        if not requests:
            raise ValueError(f"{self.kernel} loads no 32-bit words of {', '.join(arrays)}")
        return requests, cost

    def array(self, name: str) -> TracedArray:
        """Return the array of this name.

        Raises
        ------
        ValueError
            if there is no such array, or the traced blocks never accessed it.
        """
        for number, array in enumerate(self.arrays):
            if array.name == name:
                if not (self._column("array") == number).any():
                    raise ValueError(f"{self.kernel} never touches {name} in the blocks that were traced")
                return array
        raise ValueError(f"{self.kernel} has no array {name!r}; it has {', '.join(a.name for a in self.arrays)}")

    @cached_property
    def races(self) -> list[Race]:
        """Pairs of places in the source that race for shared memory, each with an example; not for global memory."""
        return list(races(self._recorder, self._table))

    @cached_property
    def unwritten(self) -> list[UnwrittenRead]:
        """Reads of shared memory that nothing had been written to, one example for each place in the source.

        An asynchronous copy counts as written once it has landed.
        """
        return list(unwritten_reads(self._recorder, self._table))

    @property
    def barriers(self) -> list[tuple[tuple[int, ...], int]]:
        """Barriers of the traced blocks in execution order: index of the block, and line in the kernel's file."""
        return [(self.blocks[block], line) for block, line in self._recorder.barriers]

    @cached_property
    def unneeded_barriers(self) -> list[int]:
        """Numbers of the first block's barriers each of which, left out alone, would leave no race.

        A number counts the block's barriers in execution order, from 0.
        """
        return list(unneeded_barriers(self._recorder, self._table))

    # ---- text

    def annotated(self) -> str:
        """Return the kernel's source, with the cost of the requests below each line that accesses memory."""
        lines = self.lines
        source = linecache.getlines(self._file)
        chosen = [int(line) for line in lines["line"] if 0 < int(line) <= len(source)]
        if not chosen:
            return f"{self.kernel}: no access"
        first, last = min(chosen), max(chosen)
        text = [f"{self.kernel}, {len(self.blocks)} block(s) of grid {self.grid}, {self._file}"]
        for number in range(first, last + 1):
            text.append(f"{number:>5} {source[number - 1].rstrip()}")
            for row in lines[lines["line"] == number].to_dict("records"):
                unit = "sectors" if row["space"] == GLOBAL else "wavefronts"
                what = f"{row['op']} {row['array']}"
                text.append(
                    f"{'':>5}     ^ {what:<18} {row['bits']:>3} bits {row['requests']:>9} requests, "
                    f"{row['per_request']:.2f} {unit} each, efficiency {row['efficiency']:.0%}"
                )
        return "\n".join(text)

    def __str__(self) -> str:
        """Return the annotated source, and a line about races."""
        if not len(self._table):
            return self.annotated()
        races = f"{len(self.races)}, such as {self.races[0]}" if self.races else "none"
        return f"{self.annotated()}\nraces in shared memory: {races}; races in global memory are not looked for"


def trace(
    stage_or_kernel: Any,
    grid: int | Sequence[int] | None,
    block: int | Sequence[int] | None,
    *args: Any,
    blocks: Iterable[Sequence[int]] | None = None,
    config: TileConfig | str | None = None,
    dynamic_shared: int | None = None,
    seed: int | None = None,
) -> Trace:
    """Run blocks of a kernel on the simulator and record each access to global and shared memory.

    Parameters
    ----------
    stage_or_kernel : str, Stage or kernel
        The name of a stage, a `Stage`, a kernel made by ``cuda.jit`` in the simulator, or a Python function.
    grid, block : int or sequence of one to three int, or None
        Number of blocks, and of threads per block, in the order x, y, z. None takes the stage's own.
    *args
        The kernel's arguments, with NumPy arrays in place of global memory; the kernel writes to them. For a stage:
        alpha, a, b, beta, c. Addresses count from the start of an array's allocation, which is assumed to be a multiple
        of 256.
    blocks : iterable of (x, y, z), optional
        Run only these; by default the whole grid. Results elsewhere are not computed.
    config : TileConfig or str, optional
        For a stage only: a configuration or its name; ``"test"`` is the small configuration used by its tests. By
        default, the stage's first.
    dynamic_shared : int, optional
        Bytes of dynamic shared memory per block. By default, the stage's own, and none for other kernels.
    seed : int, optional
        Seed of a random order of threads. By default, threads run in the order of their indices.

    Raises
    ------
    RuntimeError
        outside the simulator.
    NotImplementedError
        for a tensor core stage whose instructions the simulator lacks: any but `one_warp` and `fused_decomposition`.
    TypeError, ValueError
        if `stage_or_kernel` is neither a stage nor a kernel, or does not take the arguments; for elements that no
        single instruction loads, blocks that are outside the grid or given twice, or a kernel whose source cannot be
        found.
    Exception
        the exception of a thread, with the thread's index in the message.
    """
    made = target.prepare(stage_or_kernel, grid, block, args, config=config, dynamic_shared=dynamic_shared)
    if blocks is not None and (not isinstance(blocks, Iterable) or _is_index(blocks)):
        raise TypeError(f"blocks is {blocks!r}; expected several indices of blocks; pass [{blocks!r}]")
    chosen = None if blocks is None else list(blocks)
    if chosen and max(Counter((*np.atleast_1d(index), 0, 0)[:3] for index in chosen).values()) > 1:
        raise ValueError(f"blocks are {chosen}; expected each once")
    function = patches.python_function(made.kernel)
    recorder = Recorder(inspect.unwrap(function).__code__.co_filename)
    names = list(inspect.signature(function).parameters)
    arguments = tuple(watched(recorder, name, value) for name, value in zip(names, made.arguments, strict=False))
    replace(made, arguments=arguments).run(seed=seed, blocks=chosen, observer=recorder)
    return Trace(function.__name__, made.grid, made.block, recorder)


def _is_index(blocks: Iterable[Any]) -> bool:
    """Return True for a tuple of numbers, which is meant as the index of one block."""
    return isinstance(blocks, tuple) and len(blocks) > 1 and all(isinstance(x, (int, np.integer)) for x in blocks)


def watched(recorder: Recorder, name: str, value: Any) -> Any:
    """Return an argument of a kernel with its arrays watched, also those inside tuples."""
    if isinstance(value, np.ndarray):
        return recorder.watched(value, name)
    if isinstance(value, tuple):
        fields = getattr(value, "_fields", None)
        made = [
            watched(recorder, f"{name}[{i}]" if fields is None else f"{name}.{fields[i]}", field)
            for i, field in enumerate(value)
        ]
        return tuple(made) if fields is None else type(value)(*made)
    return value
