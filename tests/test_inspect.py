"""The inspect command, and the reading of SASS."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from compile_stages import compiler_environment

from numba_gemm.inspect import sass

# Two nested loops, as nvdisasm prints them: a tile loop that copies, a k loop that multiplies. The jump to itself that
# ends every function is a loop of no interest.
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
    with pytest.raises(sass.ToolMissing, match=re.escape("numba-gemm[test]")):
        sass.disassemble(b"")


def test_unreadable_cubin_is_reported():
    with pytest.raises(RuntimeError, match="could not read the cubin"):
        sass.disassemble(b"not a cubin")


def inspect(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "numba_gemm.inspect", *arguments],
        env=compiler_environment() | variables,
        capture_output=True,
        text=True,
        check=False,
    )


TILES = {"32x32x32-1x1": 2 * 32 * 32 * 4, "16x16x16-1x1": 2 * 16 * 16 * 4}  # of shared_tile: bytes of shared memory


def test_report_has_a_line_for_each_quantity():
    done = inspect("shared_tile", "--cc", "8.6")
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
    ("arguments", "variables", "status", "words"),
    [
        (["nonesuch"], {}, 2, ["unknown stage 'nonesuch'", "naive, coalesced"]),
        (["naive", "--config", "1x1"], {}, 2, ["no configuration '1x1'", "32x32x1-1x1"]),
        (["naive", "--cc", "90"], {}, 2, ["not a compute capability: '90'", "9.0"]),
        (["async_copy", "--cc", "7.5"], {}, 2, ["async_copy needs compute capability 8.0", "7.5"]),
        (["naive"], {"NUMBA_ENABLE_CUDASIM": "1"}, 1, ["simulator", "unset NUMBA_ENABLE_CUDASIM"]),
    ],
    ids=["stage", "config", "cc", "min_cc", "simulator"],
)
def test_errors_say_what_to_do(arguments, variables, status, words):
    done = inspect(*arguments, **variables)
    assert done.returncode == status
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr
