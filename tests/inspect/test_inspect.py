"""The inspect command, and the reading of SASS."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest
from support.compile_stages import compiler_environment
from support.ladder_cases import Case, run
from support.mutants import inspect_mutant
from support.offline import offline, run_command

from numba_gemm.device.outer_product import ORDERS, outer_product
from numba_gemm.inspect import ffma, sass
from numba_gemm.inspect.register_tile import RegisterTile, waits_on_maxwell
from numba_gemm.kernels.ladder import STAGES, TileConfig
from numba_gemm.kernels.ladder.tile_config import DEFAULT_ORDER
from numba_gemm.simulator.switch import SIMULATOR

# Two nested loops, as nvdisasm prints them: a tile loop that copies, a k loop that multiplies. The jump to itself that
# ends every function is a loop that does not count.
LISTING = """\
	.target	sm_90a
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0008*/              @!PT LDS RZ, [RZ] ;
        /*0010*/              @!P1 BRA `(.L_x_3) ;
.L_x_0:
        /*0020*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0030*/                   LDGSTS.E.BYPASS.LTC128B.128 [R7], desc[UR4][R2.64] ;
        /*0040*/                   STS.128 [R8], R4 ;
.L_x_1:
        /*0050*/                   LDS.64 R12, [R9+0x10] ;
        /*0060*/                   FFMA R20, R12, R13, R20 ;
        /*0070*/                   FFMA R21, R12, R14.reuse, R21 ;
        /*0080*/              @P0  BRA `(.L_x_1) ;
        /*0090*/                   FFMA R22, R12, R13, R22 ;
        /*00a0*/         @!UP0 BRA `(.L_x_0) ;
.L_x_3:
        /*00b0*/                   STG.E desc[UR4][R2.64], R20 ;
        /*00c0*/                   EXIT ;
.L_x_4:
        /*00d0*/                   BRA `(.L_x_4);
        /*00e0*/                   NOP;
"""


@pytest.fixture(scope="module")
def kernel() -> list[sass.Instruction]:
    functions = sass.functions(LISTING)
    assert list(functions) == ["kernel"]
    return functions["kernel"]


def test_functions_are_read_without_no_ops(kernel):
    assert [instruction.address for instruction in kernel] == list(range(0, 0xE0, 0x10))
    assert kernel[2].opcode == "LDG.E.128.CONSTANT"
    assert kernel[2].name == "LDG"


def test_functions_are_kept_apart():
    functions = sass.functions(LISTING + LISTING.replace(".text.kernel", ".text.helper"))
    assert list(functions) == ["kernel", "helper"]
    assert len(functions["kernel"]) == len(functions["helper"])


def test_branches_know_their_targets(kernel):
    targets = {instruction.address: instruction.target for instruction in kernel if instruction.name == "BRA"}
    assert targets == {0x10: 0xB0, 0x80: 0x50, 0xA0: 0x20, 0xD0: 0xD0}


def test_main_loop_is_the_innermost_one_that_multiplies(kernel):
    assert [(loop.start, loop.end) for loop in sass.loops(kernel)] == [(0x20, 0xA0), (0x50, 0x80)]
    loop = sass.main_loop(kernel)
    assert (loop.start, loop.end, loop.count("FFMA")) == (0x50, 0x80, 2)


def test_main_loop_of_straight_line_code_is_none(kernel):
    assert sass.main_loop([instruction for instruction in kernel if instruction.name != "BRA"]) is None


def test_loop_with_two_ways_back_is_one_loop():
    twice = LISTING.replace("/*0070*/                   FFMA R21, R12, R14.reuse, R21", "/*0070*/   @P2 BRA `(.L_x_1)")
    assert [(loop.start, loop.end) for loop in sass.loops(sass.functions(twice)["kernel"])] == [
        (0x20, 0xA0),
        (0x50, 0x80),
    ]


def test_access_widths(kernel):
    expected = {("LDG", 128): 1, ("LDGSTS", 128): 1, ("STS", 128): 1, ("LDS", 64): 1, ("STG", 32): 1}
    assert sass.access_widths(kernel) == expected


def test_instruction_mix(kernel):
    assert sass.instruction_mix(kernel)["FFMA"] == 3
    assert sass.instruction_mix(kernel)["BRA"] == 4


def test_missing_disassembler_names_the_extra(monkeypatch):
    monkeypatch.setattr(sass, "find_tool", lambda name: None)
    with pytest.raises(sass.ToolMissing, match=re.escape("numba-gemm[inspect]")):
        sass.disassemble(b"")


def test_unreadable_cubin_is_reported():
    with pytest.raises(RuntimeError, match="could not read the cubin"):
        sass.disassemble(b"not a cubin")


def inspect(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess(arguments, *offline(run_command, "numba_gemm.inspect.cli", arguments))


TILES = {"32x32x32-1x1": 2 * 32 * 32 * 4, "16x16x16-1x1": 2 * 16 * 16 * 4}  # of shared_tile: bytes of shared memory


def test_report_has_a_line_for_each_quantity():
    done = inspect("shared_tile", "--cc", "sm_86")
    assert done.returncode == 0, done.stderr
    blocks = [block.splitlines() for block in done.stdout.strip().split("\n\n")]
    labels = [f"config: {name} {variant}" for name in TILES for variant in ("aligned", "unaligned")]
    assert [block[0] for block in blocks] == labels
    for block in blocks:
        values = dict(line.split(": ") for line in block[1:])
        assert list(values) == ["registers", "shared", "local", "spills"]
        assert 16 <= int(values["registers"]) <= 255
        assert values["local"] == values["spills"] == "0"
    shared = [int(block[2].removeprefix("shared: ")) for block in blocks]
    assert shared == [tile_bytes for tile_bytes in TILES.values() for _ in range(2)]


def test_code_is_printed_on_request():
    done = inspect("shared_tile", "--config", "16x16x16-1x1", "--cc", "12.0", "--ptx", "--sass")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("config: ") == 2
    assert ".target sm_120a" in done.stdout
    assert "fma.rn.f32" in done.stdout
    assert re.search(r"^main loop: .*FFMA", done.stdout, re.MULTILINE)
    assert re.search(r"/\*[0-9a-f]{4}\*/.*\bFFMA\b", done.stdout)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonesuch"], ["unknown stage 'nonesuch'", "naive, coalesced"]),
        (["naive", "--config", "1x1"], ["no configuration '1x1'", "32x32x1-1x1"]),
        (["naive", "--cc", "9"], ["cc is '9'; expected a compute capability", "9.0"]),
        (["async_copy", "--cc", "7.5"], ["async_copy needs compute capability 8.0", "7.5"]),
        (["naive", "--cc", "8.5"], ["compiler does not know compute capability 8.5", "8.0, 8.6"]),
        (["naive", "--cc", "99.0", "--ffma"], ["compiler does not know compute capability 99.0", "12.0"]),
    ],
    ids=["stage", "config", "cc", "min_cc", "unknown_cc", "unknown_cc_ffma"],
)
def test_errors_say_what_to_do(arguments, words):
    done = inspect(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("(BM, BK), float32", "(BM, uint32(BK) + c.shape[0]), float32", ["PITCH = BK + 1 outside of the kernel"]),
        ("acc = float32(0)", "acc = float32('zero')", ["unicode_type"]),
    ],
)
def test_a_stage_that_numba_does_not_compile(old, new, words):
    status, out, errors = offline(inspect_mutant, "shared_tile", old, new)
    assert (status, out, errors.count("\n")) == (2, "", 1)
    for word in ["error: shared_tile 32x32x32-1x1 does not compile: ", *words]:
        assert word in errors


def test_a_closed_pipe_ends_the_command():
    """A closed pipe is what `head` leaves."""
    command = [sys.executable, "-m", "numba_gemm.inspect", "shared_tile", "--ptx"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=compiler_environment(), stdout=pipe, stderr=pipe, text=True) as running:
        assert running.stdout.readline().startswith("config: ")
        running.stdout.close()
        assert running.stderr.read() == ""
    assert running.returncode == 0


def ffmas(*operands: str) -> list[sass.Instruction]:
    """Return straight-line code: FFMAs unless a line begins with another opcode."""
    split = [
        text.partition(" ") if text[0].isupper() and text[1].isupper() else ("FFMA", "", text) for text in operands
    ]
    return [sass.Instruction(16 * i, opcode, rest) for i, (opcode, _, rest) in enumerate(split)]


def reads(*operands: str) -> list[tuple[int, int]]:
    return [one.banks for one in ffma.ffma_reads(ffmas(*operands))]


@pytest.mark.parametrize(
    ("operands", "expected"),
    [
        (["R9, R0, R1, R2"], [(2, 1)]),
        (["R9, R0, R2, R4"], [(3, 0)]),
        (["R9, -R1, |R3|, R5"], [(0, 3)]),
        (["R9, R1, 2, RZ"], [(0, 1)]),
        (["R9, R1, UR4, c[0x0][0x210]"], [(0, 1)]),
        # reuse: the same register in the same position
        (["R1, R2.reuse, R3, R1", "R5, R2, R7, R5"], [(1, 2), (0, 2)]),
        (["R1, R2.reuse, R3, R1", "R5, R7, R2, R5"], [(1, 2), (1, 2)]),
        # a hit ends the reuse, unless the operand is marked again
        (["R1, R2.reuse, R3, R1", "R5, R2, R7, R5", "R9, R2, R11, R9"], [(1, 2), (0, 2), (1, 2)]),
        (["R1, R2.reuse, R3, R1", "R5, R2.reuse, R7, R5", "R9, R2, R11, R9"], [(1, 2), (0, 2), (0, 2)]),
        # a read of the other bank keeps the reuse, one of the same bank ends it
        (["R1, R2.reuse, R3, R1", "R5, R7, R2, R5", "R9, R2, R11, R9"], [(1, 2), (1, 2), (0, 2)]),
        (["R1, R2.reuse, R3, R1", "R5, R4, R7, R5", "R9, R2, R11, R9"], [(1, 2), (1, 2), (1, 2)]),
        # other instructions count, too, except loads and stores
        (["IADD3 R1, P0, R2.reuse, R3, R4", "R5, R2, R7, R5"], [(0, 2)]),
        (["R1, R2.reuse, R3, R1", "ISETP.GE.AND P0, PT, R4, R6, PT", "R5, R2, R7, R5"], [(1, 2), (1, 2)]),
        (["R1, R2.reuse, R3, R1", "LDS.128 R12, [R4+0x10]", "R5, R2, R7, R5"], [(1, 2), (0, 2)]),
    ],
)
def test_reads_of_register_banks(operands, expected):
    assert reads(*operands) == expected


def test_collisions_depend_on_the_architecture():
    two, three, none = ffma.ffma_reads(ffmas("R9, R0, R1, R2", "R9, R1, R3, R5", "R9, R2, R1, RZ"))
    assert [one.collides for one in (two, three, none)] == [True, True, False]
    assert [one.collides_on_volta for one in (two, three, none)] == [False, True, False]


SMALL = RegisterTile([4, 5], [6, 7], [[0, 1], [2, 3]])


def test_the_registers_of_a_tile_become_ffmas():
    assert [one.operands for one in SMALL.ffma()] == [
        "R0, R4, R6, R0",
        "R1, R4, R7, R1",
        "R2, R5, R6, R2",
        "R3, R5, R7, R3",
    ]
    snake = ["R0, R4.reuse, R6, R0", "R1, R4, R7.reuse, R1", "R3, R5.reuse, R7, R3", "R2, R5, R6, R2"]
    assert [one.operands for one in SMALL.ffma(snake=True, reuse=True)] == snake
    assert [one.banks for one in SMALL.reads(snake=True)] == [(3, 0), (0, 2), (0, 2), (2, 0)]


def test_ffmas_of_a_tile_that_wait_on_maxwell():
    assert waits_on_maxwell(SMALL) == [[True, False], [True, True]]  # R0 and R4; R2 and R6; R3 and R7
    in_order = RegisterTile(range(16, 20), range(20, 24), [range(row, row + 4) for row in (0, 4, 8, 12)])
    assert waits_on_maxwell(in_order) == [[True] * 4] * 4
    sums = [[1, 2, 5, 6], [3, 0, 7, 4], [9, 10, 13, 14], [11, 8, 15, 12]]
    assert waits_on_maxwell(RegisterTile([16, 17, 20, 21], [18, 19, 22, 23], sums)) == [[False] * 4] * 4


def test_wrong_registers_of_a_tile():
    with pytest.raises(ValueError, match=r"c has rows of \[1, 1\]: expected 2 of 2"):
        RegisterTile([4, 5], [6, 7], [[0], [1]])
    with pytest.raises(ValueError, match="used more than once: R4, R6"):
        RegisterTile([4, 6], [6, 7], [[0, 1], [2, 4]])


@pytest.mark.parametrize(
    ("operands", "windows", "ports"),
    [
        ("R9, R2, R1, RZ", 1.0, 1.0),  # one read of each bank per clock
        ("R9, R0, R2, R4", 3.0, 3.0),  # three of one bank
        ("R9, R0, R2, RZ", 2.0, 2.0),
    ],
)
def test_clocks_of_one_ffma_repeated(operands, windows, ports):
    many = list(ffma.ffma_reads(ffmas(*[operands] * 300)))
    assert ffma.clocks_by_window(many, 2) == ffma.clocks_by_window(many, 4) == windows
    assert ffma.clocks_by_ports(many) == pytest.approx(ports, abs=0.02)


def test_neighbours_share_the_ports():
    """Four reads of the even bank and two of the odd one in two FFMAs take four clocks, in any arrangement."""
    many = list(ffma.ffma_reads(ffmas(*["R9, R0, R2, R1", "R9, R4, R6, R3"] * 100)))
    assert ffma.clocks_by_window(many, 2) == ffma.clocks_by_window(many, 4) == 2.0
    assert ffma.clocks_by_ports(many) == pytest.approx(2.0, abs=0.02)
    # If reads are booked ahead, an FFMA with few reads hides a conflict.
    mixed = list(ffma.ffma_reads(ffmas(*["R9, R0, R2, R1", "R9, RZ, RZ, R3"] * 100)))
    assert ffma.clocks_by_ports(mixed) == pytest.approx(1.0, abs=0.02)


def test_stats_of_a_listing(kernel):
    config = TileConfig(BM=2, BN=1, BK=1, TM=2)
    found = ffma.ffma_stats(kernel, config)
    assert (found.ffma, found.loop_ffma, found.k_steps, found.whole) == (3, 2, 1.0, True)
    assert (found.in_place, found.reuse_flags) == (2, 1)
    assert (found.even_reads, found.odd_reads) == (4, 2)  # R12, R13, R20 and R12, R14, R21
    assert (found.collisions, found.volta_collisions) == (2, 0)
    # Two clocks of one FFMA after the other, and two other instructions.
    assert (found.clocks_ports, found.loop_others) == (pytest.approx(1.0), 2)
    assert found.pipe_percent == pytest.approx(50)
    assert found.loads == "1 LDG.128.CONSTANT, 1 LDGSTS.128"
    assert not ffma.ffma_stats(kernel, TileConfig(BM=4, BN=1, BK=1, TM=4)).whole


def test_loads_behind_the_loop_are_not_of_a_and_b(kernel):
    behind = sass.Instruction(0x100, "LDG.E", "R4, desc[UR4][R2.64]")
    assert ffma.global_loads([*kernel, behind]) == ffma.global_loads(kernel)


@pytest.mark.exhaustive
def test_ffma_table():
    done = inspect("async_copy", "--ffma", "--config", STAGES["async_copy"].configs[0].name)
    assert done.returncode == 0, done.stderr
    title, heading, *table = done.stdout.splitlines()
    assert title == "async_copy for compute capability 9.0, aligned operands"
    assert table[len(ORDERS)].startswith("in loop: "), "rows of other configurations"
    table = [re.split(r"  +", line) for line in table[: len(ORDERS)]]
    names = re.split(r"  +", heading)
    for row, order in zip(table, ORDERS, strict=True):
        values = dict(zip(names, row, strict=True))
        assert values["order"] == order
        assert values["loads of A and B"] == "4 LDG.128, 8 LDGSTS.128"
        assert int(values["spills"]) == 0 or order != DEFAULT_ORDER, "others spill with some releases of the compiler"
        assert int(values["in loop"]) == 128 * int(values["k-steps"])  # whole outer products, none lost
        assert int(values["k-steps"]) in (2, 4, 8)
        assert int(values["on Volta"]) <= int(values["collide"]) <= int(values["in loop"])
        assert all(1 <= float(values[name]) < 2 for name in ("clk/2", "clk/4", "clk ports"))
        assert 50 < float(values["pipe %"]) <= 100


def test_ffma_table_of_a_stage_with_one_order():
    done = inspect("shared_tile", "--ffma", "--cc", "8.0")
    assert done.returncode == 0, done.stderr
    for config in STAGES["shared_tile"].configs:  # all of them, unless one is named
        row = next(line for line in done.stdout.splitlines() if line.startswith(config.name))
        assert row.split()[1] == "-"
        assert row.endswith("LDG.32")


ORDERED = [stage for stage in STAGES.values() if stage.ordered]


def test_default_order_keeps_its_name():
    config = STAGES["async_copy"].configs[0]
    assert config.order == ORDERS[0]
    assert config.replace(order="4x4").name == f"{config.name}-4x4"


@pytest.mark.skipif(not SIMULATOR, reason="calls device functions as Python")
@pytest.mark.parametrize("order", ORDERS)
def test_order_makes_every_product_once(order):
    a_frag, b_frag = np.array([2.0, 3, 5, 7, 11, 13, 17, 19]), np.array([23.0, 29, 31, 37])
    acc = np.ones((8, 4))
    outer_product(8, 4, order)(a_frag, b_frag, acc)
    assert (acc == 1 + np.outer(a_frag, b_frag)).all()


@pytest.mark.parametrize("order", ORDERS[1:])
@pytest.mark.parametrize("stage", ORDERED, ids=lambda stage: stage.name)
def test_orders_give_the_same_bits(stage, order):
    config = stage.test_config
    for case in (
        Case((config.BM, config.BN, 3 * config.BK), "rows", 1.0, 0.0),
        Case((config.BM - 3, config.BN - 1, config.BK + 3), "one float off", 0.5, -2.0),
    ):
        outcome = run(stage, config.replace(order=order), case)
        assert outcome.ok, str(outcome)
        assert outcome.result.tobytes() == run(stage, config, case).result.tobytes()


@pytest.mark.parametrize(
    ("extents", "order", "words"),
    [
        ((8, 8), "spiral", "the orders are columns, rows"),
        ((3, 4), "snake", "TM % 2 == 0, got 3"),
        ((8, 6), "4x4", "TM % 4 == TN % 4 == 0, got 8x6"),
    ],
)
def test_impossible_orders(extents, order, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        outer_product(*extents, order)
