"""Compiled code of every stage, for every generation of GPU that the compiler supports; needs no GPU.

A kernel can be right and still not be what its file says: an array that was to live in registers lies in local memory,
a loop was not unrolled, four accesses did not become one. None of that shows in a product, all of it shows in the SASS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Any

import pytest
from support import compile_stages
from support.offline import CompilerProcess, offline

from numba_gemm.device.access import covers
from numba_gemm.gemm.ladder_rates import RATES
from numba_gemm.gemm.small_heuristics import SMALL
from numba_gemm.kernels.ladder import STAGES
from numba_gemm.kernels.ladder.stage import MOST_PARTIAL, Variant, compensates, covering
from numba_gemm.kernels.ladder.tile_config import TileConfig
from numba_gemm.kernels.stage import Stage
from numba_gemm.kernels.tensor_core import TENSOR_STAGES

MAIN_CC = (9, 0)
# For these, NVVM makes the same PTX as for 9.0, but for tiles of stream_k that let `add_parts` start early; ptxas makes
# the same machine code for 8.9 as for 8.6.
SAME_PTX = ((7, 5), (8, 0), (8, 6))
SAME_CODE = {(8, 9): (8, 6)}
OLD_CCS = (*SAME_PTX, *SAME_CODE, MAIN_CC)
# For 12.0, NVVM makes the same PTX as for 10.0, but for stages without shared tiles.
OTHER_PTX = ((10, 0), (12, 0))

# k-steps that one iteration of the main loop multiplies in straight-line code, where a stage claims more than one.
K_STEPS = {
    "shared_tile": lambda config: config.BK,
    "vectorized": lambda config: config.BK,
    "conflict_free": lambda config: config.BK,
    "double_buffered": lambda config: config.BK,
    "warp_tiled": lambda config: 2,
    "register_prefetch": lambda config: 2,
    "moving_addresses": lambda config: 2,
    "async_copy": lambda config: 2,
    "snake_order": lambda config: 2,
    "basic_stream_k": lambda config: 2,
    "stream_k": lambda config: 2,
    "thin": lambda config: 4 if config.TM * config.TN > 1 else 2,  # a single sum adds pairs that begin with an FMUL
}

BY_ELEMENT = ("thin",)  # stages whose operands all travel by asynchronous copies, and whose C is too narrow for vectors

Code = dict[str, Any]  # of a case, from `compile_stages.outcomes`


@dataclass(frozen=True)
class Case:
    """One compilation."""

    stage: Stage
    config: TileConfig
    cc: tuple[int, int]
    aligned: bool
    ptx: tuple[int, int] | None = None  # the compute capability whose PTX is assembled, if it is another one
    variant: int | Variant | None = None  # if it is not what `aligned` stands for

    @property
    def job(self) -> dict[str, Any]:
        names = {"stage": self.stage.name, "config": self.config.name, "aligned": self.aligned}
        return names | {"cc": list(self.cc), "ptx": self.ptx and list(self.ptx), "variant": self.variant}

    def __str__(self) -> str:
        usual = "aligned" if self.aligned else "unaligned"
        variant = usual if self.variant is None else getattr(self.variant, "name", self.variant)
        return f"{self.stage.name} {self.config.name} {variant} for {self.cc[0]}.{self.cc[1]}"


# Requirements on every compilation. Each function returns a description of the defect, or None.


def stays_in_registers(case: Case, code: Code) -> str | None:
    accesses = {"LDL", "STL"} & code["opcodes"].keys()
    if code["local"] or code["spills"] or accesses:
        return f"{code['local']} bytes of local memory, {code['spills']} bytes of spills, {accesses or 'no accesses'}"
    return None


def unrolls_inner_loops(case: Case, code: Code) -> str | None:
    """The main loop's straight-line code holds every product of the thread tile for the k-steps that are claimed."""
    steps = K_STEPS[case.stage.name](case.config) if case.stage.name in K_STEPS else 1
    expected = case.config.TM * case.config.TN * steps
    found = code["ffma_in_loop"]
    return None if found >= expected else f"{found} FFMA an iteration, expected {expected}: {steps} k-steps"


def addresses_name_their_memory(case: Case, code: Code) -> str | None:
    """No generic LD or ST: the compiler knows what is global and what is shared."""
    generic = {"LD", "ST"} & code["opcodes"].keys()
    return f"generic accesses: {generic}" if generic else None


def accesses_are_as_wide_as_claimed(case: Case, code: Code) -> str | None:
    """With aligned operands, global accesses and reads of shared tiles move four floats, as do some writes of tiles."""
    if not (case.aligned and case.stage.vectorized):
        return None
    widths: dict[str, set[int]] = {}
    for name, bits in code["widths"]:
        widths.setdefault(name, set()).add(bits)
    claimed = ("LDS",) if case.stage.name in BY_ELEMENT else ("LDG", "STG", "LDS")
    narrow = {name: widths.get(name) for name in claimed if widths.get(name) != {128}}
    writes = widths.get("STS", set()) | widths.get("LDGSTS", set())
    wide = 128 in writes or case.config.BN <= 16  # so narrow a B takes no vectors, and A is transposed on its way
    return None if wide and not narrow else f"not all 128 bits: {narrow or {'STS, LDGSTS': writes}}"


def copies_asynchronously_if_claimed(case: Case, code: Code) -> str | None:
    copying = ("async_copy", "snake_order", "basic_stream_k", "stream_k", "short_sums", "thin")
    claimed, found = case.stage.name in copying, "LDGSTS" in code["opcodes"]
    return None if claimed == found else f"LDGSTS: {found}, expected {claimed}"


def shared_memory_holds_the_tiles_alone(case: Case, code: Code) -> str | None:
    config = case.config
    width = config.BM + config.pad + config.BN + config.pad_b
    tiles = 4 * config.slots * config.BK * width if config.BK > 1 and config.tiles == 1 else 0
    return None if code["shared"] == tiles else f"{code['shared']} bytes of shared memory, expected {tiles}"


def lanes_run_in_step(case: Case, code: Code) -> str | None:
    """From 9.0 on, the compiler knows that a warp's lanes do not diverge for good; loops have uniform registers."""
    found = code["opcodes"].get("WARPSYNC", 0) if case.cc >= (9, 0) else 0
    return f"{found} WARPSYNC" if found else None


RESOURCES = (stays_in_registers, shared_memory_holds_the_tiles_alone)  # what the assembler tells
CLAIMS = (
    stays_in_registers,
    unrolls_inner_loops,
    addresses_name_their_memory,
    accesses_are_as_wide_as_claimed,
    copies_asynchronously_if_claimed,
    shared_memory_holds_the_tiles_alone,
    lanes_run_in_step,
)
Claims = tuple[Callable[[Case, Code], str | None], ...]


def compile_cases(batch: list[Case]) -> Iterator[tuple[Case, Code]]:
    """Compile cases where there is a compiler."""
    return zip(batch, offline(compile_stages.outcomes, [case.job for case in batch]))


def assemble_cases(case: Case, ccs: Iterable[tuple[int, int]]) -> Iterator[tuple[Case, Code]]:
    """Assemble the PTX of a case for other compute capabilities."""
    batch = [replace(case, cc=cc, ptx=case.cc) for cc in ccs if case.stage.runs_on(cc)]
    return zip(batch, offline(compile_stages.assembled, [one.job for one in batch]))


def check(compiled: Iterable[tuple[Case, Code]], claims: Claims = CLAIMS) -> None:
    outcomes = list(compiled)
    assert outcomes
    found = ((case, claim.__name__, claim(case, code)) for case, code in outcomes for claim in claims)
    if lines := [f"{case}: not {name}: {problem}" for case, name, problem in found if problem]:
        pytest.fail("\n".join(lines), pytrace=False)


# Stages of a test are compiled one after the other and read at once: nvdisasm takes 0.3 s before the first instruction.
FOURTHS = [list(STAGES)[i::4] for i in range(4)]


@pytest.mark.parametrize("names", FOURTHS, ids="-".join)
def test_compiled_stage_is_what_it_claims(names):
    """For 9.0; and for others with the same PTX, whose registers alone are another matter."""
    aligned, unaligned = (
        [Case(STAGES[name], STAGES[name].configs[0], MAIN_CC, aligned) for name in names] for aligned in (True, False)
    )
    check(compile_cases([case for pair in zip(unaligned, aligned) for case in pair]))
    check(chain.from_iterable(assemble_cases(case, SAME_PTX) for case in aligned), RESOURCES)


@pytest.mark.parametrize(("name", "cached"), [("thin", True), ("short_sums", True), ("stream_k", False)])
def test_operands_stored_by_columns_are_copied_through_the_l1_cache(name, cached):
    config = next(one for one in STAGES[name].configs if (one.BM, one.BN) == (32, 32))
    ways = [("along4", "along4"), ("along4", "across4"), ("across4", "along4")]
    batch = [Case(STAGES[name], config, MAIN_CC, True, variant=Variant(a, b, True)) for a, b in ways]
    copies = [code["cached_copies"] > 0 for _, code in compile_cases(batch)]
    assert copies == [False, cached, cached]


def test_parts_of_sums_in_thin_meet_without_counters():
    thin = STAGES["thin"]
    config = next(one for one in thin.configs if (one.BM, one.BN) == (32, 16))
    ((_, code),) = compile_cases([Case(thin, config, MAIN_CC, True)])
    assert not {"ATOM", "ATOMG", "RED", "MEMBAR"} & code["opcodes"].keys()
    assert set(map(tuple, code["ordered_widths"])) == {("LDG", 128), ("STG", 128)}  # four sums per thread and part


CHOSEN = {SMALL.name, *(name for name, *_ in RATES)}  # stages that "auto" may mean
SEVERAL = [name for name, stage in STAGES.items() if len(stage.configs) > 1]
GROUPS = {
    "stream_k": ["stream_k"],
    "other stages of auto": [name for name in SEVERAL if name in CHOSEN and name != "stream_k"],
    "other stages": [name for name in SEVERAL if name not in CHOSEN],
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("group", GROUPS)
def test_every_configuration_is_what_it_claims(group):
    """For aligned operands; for others, too, where they are computed in other configurations than the first."""
    batch = [
        Case(stage, config, MAIN_CC, aligned)
        for stage in map(STAGES.__getitem__, GROUPS[group])
        for config in stage.configs[1:]
        for aligned in ((True, False) if stage.name in CHOSEN else (True,))
    ]
    check(compile_cases(batch))


# Halves, so that two processes have work.
@pytest.mark.exhaustive
@pytest.mark.parametrize("half", [0, 1])
def test_stages_are_what_they_claim_from_10_0_on(half):
    """For 12.0, stages that "auto" does not choose are assembled from their PTX for 10.0."""
    first, other = OTHER_PTX
    batch, compiled = [], []
    for stage in list(STAGES.values())[half::2]:
        config = stage.configs[0]
        both = stage.name in CHOSEN or config.BK == 1
        batch += [Case(stage, config, first, True), Case(stage, config, other, True, None if both else first)]
        compiled += [stage.name] * (stage.name in CHOSEN and config.BK > 1)
    outcomes = list(compile_cases(batch))
    check(outcomes)
    codes = {(case.stage.name, case.cc): code for case, code in outcomes}
    assert all(codes[name, first]["ptx"] == codes[name, other]["ptx"] for name in compiled)


VECTORS = ("along4", "across4")
# Compute capabilities for which all variants are assembled, by that of their PTX. Below 9.0, stream_k spills where C is
# not aligned.
ASSEMBLED = {
    "vectorized": {MAIN_CC: (MAIN_CC, *SAME_PTX), OTHER_PTX[0]: OTHER_PTX},
    "stream_k": {MAIN_CC: (MAIN_CC,), OTHER_PTX[0]: OTHER_PTX},
}


def variants(stage: Stage, config: TileConfig) -> list[int | Variant]:
    """Return all variants of a stage, of a scheduled one those with 128-bit accesses to both operands."""
    if not stage.takes_variants:
        return list(stage.fits)
    a, b = (
        [access for access in VECTORS if covers(access, extent, config.BK, config.threads)]
        for extent in (config.BM, config.BN)
    )
    stores = [(True, False, False), (False, False, False)]  # whether C is aligned and partial, and A or B has tails
    if config.TN > 1:
        stores.append((True, True, True) if config.TM * config.TN <= MOST_PARTIAL else (False, False, True))
    return [
        Variant(*accesses, c, c_partial=c_partial, tails=tails)
        for accesses in product(a, b)
        for c, c_partial, tails in stores
    ]


# For one compute capability after the other: Numba types and lowers a variant once.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "config", "variant"),
    [
        (name, config, one)
        for name in ASSEMBLED
        for config in STAGES[name].configs
        for one in variants(STAGES[name], config)
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_every_variant_stays_in_registers(name, config, variant):
    """With nearly all registers in use, a variant may need more than those that the other tests compile."""
    stage = STAGES[name]
    firsts = ASSEMBLED[name].items()
    cases = ((Case(stage, config, first, True, variant=variant), ccs) for first, ccs in firsts)
    check(chain.from_iterable(assemble_cases(*case) for case in cases), RESOURCES)


COMPENSATED = [
    (name, config) for name in ("thin", "stream_k") for config in STAGES[name].configs if compensates(config)
]


def compensated_cases(name: str, config: TileConfig, ways: Iterable[tuple[str, str]]) -> list[Case]:
    """Return compensated variants with accesses to A and B, or the most general ones instead."""
    stage, found = STAGES[name], dict[Variant, None]()
    for way in ways:
        able = [covering(config, extent) for extent in (config.BM, config.BN)]
        a, b = (access if access in some else some[-1] for access, some in zip(way, able))
        found[Variant(a, b, name == "stream_k" and way[1].endswith("4"), compensated=True)] = None
    return [Case(stage, config, MAIN_CC, False, variant=variant) for variant in found]


OF_COMPENSATED = (
    stays_in_registers,
    unrolls_inner_loops,
    addresses_name_their_memory,
    shared_memory_holds_the_tiles_alone,
)


def test_compensated_sums_stay_in_registers():
    """The largest thread tiles of both stages, which have twice the accumulators."""
    largest = [next(one for one in COMPENSATED if sums == one[1].TM * one[1].TN) for sums in (64, 32)]
    batch = [one for found in largest for one in compensated_cases(*found, [("along4", "along4")])]
    check(compile_cases(batch), OF_COMPENSATED)


@pytest.mark.exhaustive
@pytest.mark.parametrize("config", STAGES["small_matrices"].configs, ids=lambda config: config.name)
def test_small_matrices_stay_in_registers_in_every_precision(config):
    sums = ({}, {"compensated": True}, {"in_float64": True})
    accesses = [("any", "any"), ("along4", "along4")] + [("along4", "across4")] * (config.TN == 4)
    variants = [Variant(*both, False, **one) for both in accesses for one in sums]
    cases = [Case(STAGES["small_matrices"], config, MAIN_CC, False, variant=one) for one in variants]
    check(compile_cases(cases), (stays_in_registers,))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "config"), COMPENSATED, ids=lambda value: getattr(value, "name", value))
def test_every_compensated_configuration_stays_in_registers(name, config):
    ways = product(("along4", "across4", "along1", "any"), ("along4", "across4", "across1", "any"))
    check(compile_cases(compensated_cases(name, config, ways)), OF_COMPENSATED)


@pytest.mark.exhaustive
def test_kernels_of_products_for_every_compute_capability_below_10_0():
    """Nothing is concluded from another compute capability, and what `SAME_PTX` and `SAME_CODE` say is true."""
    stages = [STAGES[name] for name in ("shared_tile", "thin", "stream_k")]
    batch = [Case(stage, stage.configs[0], cc, True) for stage in stages for cc in OLD_CCS if stage.runs_on(cc)]
    outcomes = list(compile_cases(batch))
    check(outcomes)
    for stage in stages:
        codes = {case.cc: code for case, code in outcomes if case.stage is stage}
        assert len({code["ptx"] for code in codes.values()}) == 1, stage.name
        assert all(codes[cc]["code"] == codes[same]["code"] for cc, same in SAME_CODE.items()), stage.name
        assert codes[8, 0]["code"] != codes[8, 6]["code"], stage.name


def test_code_that_is_read_at_once_is_that_of_each_kernel():
    batch = [Case(stage, stage.configs[0], MAIN_CC, True) for stage in (STAGES["naive"], STAGES["thread_tile_1d"])]
    assert offline(compile_stages.read_alike, [case.job for case in batch]) == [True, True]


def test_one_warp_multiplies_by_one_instruction():
    stage = TENSOR_STAGES["one_warp"]
    ccs = [cc for cc in OLD_CCS + OTHER_PTX if cc >= stage.min_cc]
    assert len(ccs) == 6
    for case, code in compile_cases([Case(stage, stage.configs[0], cc, True) for cc in ccs]):
        for claim in (stays_in_registers, addresses_name_their_memory):
            assert claim(case, code) is None, f"{case}: {claim.__name__}"
        found = {name: code["opcodes"].get(name, 0) for name in ("HMMA", "F2FP", "LDG", "STG", "BAR")}
        # Six words of two floats, and C once more: it is written with and without beta * C.
        assert found == {"HMMA": 1, "F2FP": 6, "LDG": 12 + 4, "STG": 2 * 4, "BAR": 0}, f"{case}: {found}"
        assert code["shared"] == 0


# Settings of Numba that users make for their own kernels.
SETTINGS = ("NUMBA_BOUNDSCHECK", "NUMBA_CUDA_DEBUGINFO", "NUMBA_CUDA_ENABLE_NRT", "NUMBA_DEBUG_ARRAY_OPT")


def test_settings_of_numba_change_no_stage():
    stage = STAGES["shared_tile"]
    case = Case(stage, stage.configs[-1], MAIN_CC, True)
    with closing(CompilerProcess(**dict.fromkeys(SETTINGS, "1"))) as compiler:
        assert compiler(compile_stages.assembled, [case.job]) == offline(compile_stages.assembled, [case.job])
