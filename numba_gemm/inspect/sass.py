"""Parsing of SASS, the GPU's machine instructions, to show what a kernel's main loop consists of.

`disassemble` runs NVIDIA's nvdisasm on a cubin. All other functions parse its output and need neither a GPU nor a
toolkit.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SECTION = re.compile(r"^\.text\.(?P<function>\S+):\s*$")
LABEL = re.compile(r"^(?P<label>\.L\w+):\s*$")
INSTRUCTION = re.compile(
    r"^\s*/\*(?P<address>[0-9a-f]+)\*/\s+(?:\{\s*)?(?:@(?P<predicate>!?U?P\w+)\s+)?(?P<opcode>[A-Z][A-Z0-9_.]*)\s*(?P<operands>[^;]*?)\s*;"
)
TARGET = re.compile(r"`\((?P<label>\.L\w+)\)")

# Modifiers that give the width of an access in bits; an access without one moves 32 bits.
WIDTHS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}
MEMORY = frozenset({"LD", "ST", "LDG", "STG", "LDS", "STS", "LDL", "STL", "LDGSTS"})
NEVER = "!PT"  # a predicate that is always false: such instructions are only workarounds for hardware errata


class ToolMissing(RuntimeError):
    """Error for a program of the CUDA toolkit that is not installed; the message says how to get it."""


@dataclass(frozen=True)
class Instruction:
    """One instruction: its address, opcode with modifiers, operands, and the target address if it is a branch."""

    address: int
    opcode: str
    operands: str
    target: int | None = None

    @property
    def name(self) -> str:
        """The opcode without its modifiers: LDS for LDS.128."""
        return self.opcode.partition(".")[0]

    @property
    def bits(self) -> int | None:
        """Bits that one thread moves; None unless the instruction is a load or a store."""
        if self.name not in MEMORY:
            return None
        return next((WIDTHS[part] for part in self.opcode.split(".")[1:] if part in WIDTHS), 32)


@dataclass(frozen=True)
class Loop:
    """The instructions from the target of a backward branch to the branch itself."""

    instructions: tuple[Instruction, ...]

    @property
    def start(self) -> int:
        """Address of the first instruction."""
        return self.instructions[0].address

    @property
    def end(self) -> int:
        """Address of the branch that closes the loop."""
        return self.instructions[-1].address

    def count(self, name: str) -> int:
        """Return the number of instructions with this opcode, whatever their modifiers."""
        return sum(instruction.name == name for instruction in self.instructions)

    def encloses(self, other: Loop) -> bool:
        """Return True if another loop lies within this one."""
        return self != other and self.start <= other.start and other.end <= self.end


def disassemble(cubin: bytes) -> str:
    """Return the SASS of a cubin, as nvdisasm prints it.

    Raises
    ------
    ToolMissing
        if nvdisasm is neither in an installed ``nvidia-cuda-nvdisasm`` package, nor in a CUDA toolkit, nor on PATH.
    RuntimeError
        with nvdisasm's message, if it cannot read the cubin.
    """
    nvdisasm = find_tool("nvdisasm")
    if nvdisasm is None:
        raise ToolMissing(
            "nvdisasm was not found, so there is no SASS to read: pip install 'numba-gemm[inspect]', "
            "or put a CUDA toolkit's bin folder on PATH"
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        done = subprocess.run([nvdisasm, "-c", str(path)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(
            f"nvdisasm ({nvdisasm}) could not read the cubin: {done.stderr.strip() or done.stdout.strip()}"
        )
    return done.stdout


def find_tool(name: str) -> str | None:
    """Return the path of a CUDA toolkit program from installed wheels, a toolkit, or PATH, in that order, or None."""
    from cuda.pathfinder import find_nvidia_binary_utility

    return find_nvidia_binary_utility(name) or shutil.which(name)


def functions(listing: str) -> dict[str, list[Instruction]]:
    """Return the instructions of every function of an nvdisasm listing, in address order, without no-ops.

    Parameters
    ----------
    listing : str
        Output of ``nvdisasm -c``.

    Returns
    -------
    dict
        Instructions by (mangled) function name. Kernels whose device functions are all inlined have one entry.
    """
    found: dict[str, list[tuple[int, str, str]]] = {}
    labels: dict[str, int] = {}
    waiting: list[str] = []  # labels seen since the last instruction; they name the next one
    current: list[tuple[int, str, str]] | None = None
    for line in listing.splitlines():
        if section := SECTION.match(line):
            current = found.setdefault(section["function"], [])
        elif label := LABEL.match(line):
            waiting.append(label["label"])
        elif current is not None and (match := INSTRUCTION.match(line)):
            address = int(match["address"], 16)
            labels.update(dict.fromkeys(waiting, address))
            waiting.clear()
            if match["opcode"] == "NOP" or match["predicate"] == NEVER:
                continue
            current.append((address, match["opcode"], match["operands"]))

    def instruction(address: int, opcode: str, operands: str) -> Instruction:
        jump = TARGET.search(operands) if opcode.startswith("BRA") else None
        return Instruction(address, opcode, operands, labels.get(jump["label"]) if jump else None)

    return {name: [instruction(*row) for row in rows] for name, rows in found.items() if rows}


def loops(instructions: Sequence[Instruction]) -> list[Loop]:
    """Return the loops of one function: one per target of backward branches, up to the last of those branches."""
    last_branch: dict[int, int] = {}
    for position, instruction in enumerate(instructions):
        if instruction.target is not None and instruction.target < instruction.address:
            last_branch[instruction.target] = position
    return [
        Loop(tuple(i for i in instructions[: position + 1] if i.address >= start))
        for start, position in sorted(last_branch.items())
    ]


def main_loop(instructions: Sequence[Instruction]) -> Loop | None:
    """Return the innermost loop with the most multiply-adds, where a kernel spends its time; None if no loop has any.

    Innermost means that no smaller loop with a multiply-add lies within it, so its FFMAs are those of one iteration.
    If there are as many FFMAs as the tile has products, the tile's inner loops were unrolled.
    """
    candidates = [loop for loop in loops(instructions) if loop.count("FFMA")]
    innermost = [loop for loop in candidates if not any(loop.encloses(other) for other in candidates)]
    return max(innermost, key=lambda loop: loop.count("FFMA"), default=None)


def instruction_mix(instructions: Sequence[Instruction]) -> Counter[str]:
    """Count each opcode, without modifiers: ``{"FFMA": 512, "LDS": 32, ...}``."""
    return Counter(instruction.name for instruction in instructions)


def access_widths(instructions: Sequence[Instruction]) -> Counter[tuple[str, int]]:
    """Count each memory opcode at each width in bits: ``{("LDS", 128): 32, ("STG", 32): 64, ...}``."""
    return Counter((i.name, i.bits) for i in instructions if i.bits is not None)
