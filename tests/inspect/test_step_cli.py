"""``numba-gemm step``: the stages that it names, and the forms of a shape."""

from __future__ import annotations

import argparse

import pytest

from numba_gemm import __main__ as command
from numba_gemm.inspect.step_cli import extents
from numba_gemm.kernels import STAGES
from numba_gemm.terminal import USAGE

pytestmark = pytest.mark.simulator


def test_an_unknown_stage_lists_those_that_can_be_stepped(capsys):
    assert command.main(("step", "nosuch")) == USAGE
    listed = capsys.readouterr().err.partition("expected one of ")[2].partition("; pass one of these")[0].split(", ")
    assert {"naive", "stream_k", "one_warp", "fused_decomposition"} <= set(listed)
    for name in STAGES:
        assert command.main(("step", name, "--shape", "1x1x1", "--thread", "1024")) == USAGE
        lacks = "instructions that the simulator lacks" in capsys.readouterr().err
        assert lacks == (name not in listed), name


@pytest.mark.parametrize("text", ["16,8,24", "16x8x24", "16X8X24"])
def test_shapes_have_two_forms(text):
    assert extents(text) == (16, 8, 24)


@pytest.mark.parametrize("text", ["2x2", "2x2x0", "2,2,2,2", "a", "2x2x-1", ""])
def test_a_wrong_shape_is_told_what_is_expected(text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected M, N and K, from 1 on, such as 16,16,16"):
        extents(text)
