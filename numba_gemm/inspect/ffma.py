"""Analysis of how well a kernel feeds the FP32 pipe: multiply-adds, register banks, and loads of A and B.

An FFMA reads three registers and writes one. The register file has banks, and reads that conflict in a bank wait:

Volta (compute capability 7.x)
    two banks, even and odd registers, each 64 bits wide per lane. An FFMA whose three sources fall in one bank takes
    one more clock. The peak is one FFMA per partition every second clock. Z. Jia et al., "Dissecting the NVIDIA Volta
    GPU Architecture via Microbenchmarking", section 3.1, https://arxiv.org/abs/1804.06826. (Maxwell and Pascal had
    four 32-bit banks, register number modulo four: S. Gray, https://github.com/NervanaSystems/maxas/wiki/SGEMM.)
Ampere and later
    two banks, even and odd registers, each with one read of 1024 bits (one register of a warp) per clock. An FFMA
    books its reads within the next three clocks and waits until it can. Three sources in one bank therefore cost two
    clocks, and any two FFMAs that read six registers cost one. With 32 lanes per partition, an FFMA could start every
    clock, but two ports cannot deliver its three operands, except for those that are reused. R. Huerta et al.,
    "Dissecting and Modeling the Architecture of Modern GPU Cores", MICRO 2025, section 5.3,
    https://doi.org/10.1145/3725843.3756064 (preprint: https://arxiv.org/abs/2503.20481), measured on an RTX A6000.
    Nothing is published for Hopper; it is assumed to be the same.
Reuse
    an operand marked ``.reuse`` stays in a cache behind its port, which has one slot per bank and per operand position
    (three). A read of the same register in the same position is served from the slot. Any read of that bank in that
    position clears the slot, unless the operand is marked again. (The same, section 5.3.1.)

All results are derived from the text of nvdisasm, for a single warp that runs alone. They bound the time rather than
predict it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..device.outer_product import ORDERS
from ..kernels.ladder.stage import LadderStage
from ..kernels.ladder.tile_config import TileConfig
from .report import compiled
from .sass import Instruction, loops, main_loop

BANKS = 2
POSITIONS = 3  # number of source operands of an instruction
READ_CLOCKS = 3  # clocks within which an instruction books the reads of all its operands
OWN_QUEUE = frozenset({"LD", "LDG", "LDS", "LDL", "LDGSTS", "ST", "STG", "STS", "STL"})  # read operands elsewhere

REGISTER = re.compile(r"[-~|]*R(?P<number>\d+)(?P<reuse>\.reuse)?\|?")
PREDICATE = re.compile(r"!?U?P(\d|T)")


@dataclass(frozen=True)
class Reads:
    """Source registers of one FFMA.

    banks
        reads of even and of odd registers that the reuse cache does not serve.
    flags
        operands that are marked for reuse.
    in_place
        True if the sum overwrites its own addend.
    """

    banks: tuple[int, int]
    flags: int
    in_place: bool

    @property
    def collides(self) -> bool:
        """True if a bank is read twice or more: a conflict on Ampere and later."""
        return max(self.banks) > 1

    @property
    def collides_on_volta(self) -> bool:
        """True if three reads fall in one bank: a conflict on Volta."""
        return max(self.banks) > 2


def source_operands(instruction: Instruction) -> list[re.Match[str] | None]:
    """Return the source operands by position, without predicates and destination; None if not a register."""
    # The destination comes first: a register, or the predicates of a comparison.
    others = [text.strip() for text in instruction.operands.split(",")][1:]
    operands = [text for text in others if not PREDICATE.fullmatch(text)]
    return [REGISTER.fullmatch(text) for text in operands[:POSITIONS]]


def ffma_reads(instructions: Sequence[Instruction]) -> Iterator[Reads]:
    """Yield the reads of every FFMA in straight-line code, starting with an empty reuse cache.

    Loads and stores do not affect the reuse cache: ptxas marks operands for reuse across them.
    """
    kept: dict[tuple[int, int], int] = {}
    for instruction in instructions:
        if instruction.name in OWN_QUEUE:
            continue
        banks, flags = [0] * BANKS, 0
        for position, operand in enumerate(source_operands(instruction)):
            if operand is None:
                continue
            number = int(operand["number"])
            bank = number % BANKS
            banks[bank] += kept.pop((bank, position), None) != number
            if operand["reuse"]:
                kept[bank, position] = number
                flags += 1
        if instruction.name == "FFMA":
            destination = instruction.operands.partition(",")[0].strip()
            addend = instruction.operands.rpartition(",")[2].strip().removesuffix(".reuse")
            yield Reads((banks[0], banks[1]), flags, destination == addend)


def clocks_by_window(reads: Sequence[Reads], window: int) -> float:
    """Return the fewest clocks per FFMA by the reads of each bank in windows of FFMAs, averaged over all windows.

    A window takes one clock per FFMA, or one clock per read of the busier bank, whichever is more.
    """
    spans = [reads[start : start + window] for start in range(len(reads) - window + 1)]
    clocks = [max(window, *(sum(one.banks[bank] for one in span) for bank in range(BANKS))) for span in spans]
    return sum(clocks) / (window * len(clocks)) if clocks else float("nan")


def clocks_by_ports(reads: Sequence[Reads]) -> float:
    """Return clocks per FFMA if one starts per clock, as soon as it can book all its reads within `READ_CLOCKS`."""
    start, free = -1, [0] * BANKS  # the clock of the latest FFMA, and the first clock at which each bank is free
    for one in reads:
        start += 1
        for bank, count in enumerate(one.banks):
            if count:
                start = max(start, free[bank] + count - READ_CLOCKS)
        for bank, count in enumerate(one.banks):
            if count:
                free[bank] = max(free[bank], start) + count
    return (start + 1) / len(reads) if reads else float("nan")


def global_loads(instructions: Sequence[Instruction]) -> Counter[str]:
    """Count loads from global memory up to the end of the last loop with FFMAs, those of A and B, by kind and width.

    ``LDG.128.CONSTANT`` takes the read-only path (PTX: ld.global.nc), ``LDG.128`` the ordinary one, and ``LDGSTS``
    bypasses the registers. Loads after the loop read C.
    """
    ends = [loop.end for loop in loops(instructions) if loop.count("FFMA")]
    found: Counter[str] = Counter()
    for instruction in instructions:
        if instruction.name in ("LDG", "LDGSTS") and (not ends or instruction.address <= max(ends)):
            constant = ".CONSTANT" if "CONSTANT" in instruction.opcode.split(".") else ""
            found[f"{instruction.name}.{instruction.bits}{constant}"] += 1
    return found


@dataclass(frozen=True)
class FfmaStats:
    """Cost of a kernel's multiply-adds; all values except ``ffma`` and ``loads`` are for the main loop's body.

    ffma
        FFMAs of the whole kernel.
    loop_ffma, k_steps
        FFMAs of one iteration, and the number of outer products of the thread tile that they amount to; not a whole
        number if products were lost or computed twice.
    loop_others
        other instructions of the loop.
    in_place
        FFMAs that overwrite their own addend; the others move the accumulator to another register.
    reuse_flags
        operands marked for reuse.
    even_reads, odd_reads
        reads of the two banks that the reuse cache does not serve.
    collisions
        FFMAs that read a bank twice or more, which makes Ampere and later architectures wait.
    volta_collisions
        FFMAs that read a bank three times, which makes Volta and Turing wait.
    clocks_2, clocks_4
        `clocks_by_window`.
    clocks_ports
        `clocks_by_ports`.
    pipe_percent
        upper bound on the loop's utilisation of an FMA pipe that takes one FFMA per clock: each FFMA takes
        `clocks_ports`, each other instruction takes one clock to issue, and enough warps hide all other latencies.
    loads
        `global_loads`, as text.
    """

    ffma: int
    loop_ffma: int
    k_steps: float
    loop_others: int
    in_place: int
    reuse_flags: int
    even_reads: int
    odd_reads: int
    collisions: int
    volta_collisions: int
    clocks_2: float
    clocks_4: float
    clocks_ports: float
    pipe_percent: float
    loads: str

    @property
    def whole(self) -> bool:
        """True if an iteration computes each product of the thread tile equally often."""
        return self.k_steps > 0 and self.k_steps == int(self.k_steps)


def ffma_stats(instructions: Sequence[Instruction], config: TileConfig) -> FfmaStats:
    """Analyse a kernel's instructions, from `sass.functions` or ``Compiled.instructions``."""
    loop = main_loop(instructions)
    reads = list(ffma_reads(loop.instructions)) if loop else []
    others = len(loop.instructions) - len(reads) if loop else 0
    clocks_ports = clocks_by_ports(reads)
    return FfmaStats(
        ffma=sum(instruction.name == "FFMA" for instruction in instructions),
        loop_ffma=len(reads),
        k_steps=len(reads) / (config.TM * config.TN),
        loop_others=others,
        in_place=sum(one.in_place for one in reads),
        reuse_flags=sum(one.flags for one in reads),
        even_reads=sum(one.banks[0] for one in reads),
        odd_reads=sum(one.banks[1] for one in reads),
        collisions=sum(one.collides for one in reads),
        volta_collisions=sum(one.collides_on_volta for one in reads),
        clocks_2=clocks_by_window(reads, 2),
        clocks_4=clocks_by_window(reads, 4),
        clocks_ports=clocks_ports,
        pipe_percent=100 * len(reads) / (len(reads) * clocks_ports + others),  # NaN without an FFMA
        loads=", ".join(f"{count} {name}" for name, count in sorted(global_loads(instructions).items())) or "none",
    )


def orders(stage: LadderStage, config: TileConfig) -> Iterator[TileConfig]:
    """Yield a configuration with every order of products that its stage supports, its own order first."""
    yield config
    if stage.ordered:
        yield from (config.replace(order=order) for order in ORDERS if order != config.order)


def rows(stage: LadderStage, cc: tuple[int, int], config_name: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield one row per configuration, or of only the named one, and per order, for aligned operands.

    ``pandas.DataFrame(rows(stage, (9, 0)))`` has the columns stage, config, order, registers, spills, and those of
    `FfmaStats`.
    """
    for config in stage.configs:
        if config_name in (None, config.name):
            for ordered in orders(stage, config):
                yield row(stage, config, ordered, cc)


def row(stage: LadderStage, config: TileConfig, ordered: TileConfig, cc: tuple[int, int]) -> dict[str, Any]:
    """Return one row of `rows`: the name of a configuration, and the analysis of it in another order."""
    made = compiled(stage, ordered, cc)
    order = ordered.order if stage.ordered else "-"
    about: dict[str, Any] = {"stage": stage.name, "config": config.name, "order": order}
    about |= {"registers": made.registers, "spills": made.spills}
    return about | asdict(ffma_stats(made.instructions, ordered))


HEADINGS = {
    "config": "config",
    "order": "order",
    "registers": "regs",
    "spills": "spills",
    "ffma": "FFMA",
    "loop_ffma": "in loop",
    "k_steps": "k-steps",
    "loop_others": "others",
    "in_place": "in place",
    "reuse_flags": "reuse",
    "even_reads": "even",
    "odd_reads": "odd",
    "collisions": "collide",
    "volta_collisions": "on Volta",
    "clocks_2": "clk/2",
    "clocks_4": "clk/4",
    "clocks_ports": "clk ports",
    "pipe_percent": "pipe %",
    "loads": "loads of A and B",
}
LEGEND = """\
in loop: FFMAs of the main loop's body, k-steps: that many outer products of the thread tile, others: instructions
beside them. in place: FFMAs that replace their own addend. reuse: operands marked so. even, odd: reads of the register
banks that the reuse cache does not serve. collide: FFMAs that read a bank twice or more. on Volta: three times.
clk/2, clk/4: least clocks an FFMA by the reads of two or four in a row, clk ports: with reads booked three clocks
ahead. pipe %: the most of the FMA pipe that this and the other instructions leave. Rules: numba_gemm/inspect/ffma.py"""


def as_text(table: Sequence[dict[str, Any]]) -> str:
    """Format rows as columns under `HEADINGS`."""

    def cell(value: object) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    cells = [list(HEADINGS.values()), *([cell(one[name]) for name in HEADINGS] for one in table)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEADINGS))]
    aligners = [str.ljust if name in ("config", "order", "loads") else str.rjust for name in HEADINGS]
    lines = ("  ".join(align(text, width) for align, text, width in zip(aligners, line, widths)) for line in cells)
    return "\n".join(line.rstrip() for line in lines)
