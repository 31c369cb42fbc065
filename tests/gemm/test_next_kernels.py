"""Kernels that a program may need after a product: which ones they are, and that they are compiled ahead."""

from __future__ import annotations

import itertools
import logging
import sys
import types

import numpy as np
import pytest
from support.array_libraries import tensor
from support.operands import filled

from numba_gemm import tiled_sgemm
from numba_gemm.gemm import heuristics, next_kernels
from numba_gemm.kernels import STAGES
from numba_gemm.kernels.product import Layout, Product, dense
from numba_gemm.lab.bench import first_products_child
from numba_gemm.runtime import device as devices
from numba_gemm.runtime import kernel_cache


def layout(x):
    return Layout(*x.shape, *x.strides)


@pytest.mark.parametrize(("a_order", "b_order"), list(itertools.product("NT", repeat=2)))
def test_gradients_are_those_of_a_product(a_order, b_order):
    m, n, k = 8, 12, 4
    a = filled(m, k) if a_order == "N" else filled(k, m).T
    b = filled(k, n) if b_order == "N" else filled(n, k).T
    c = filled(m, n)
    of_a, of_b = next_kernels.gradients(Product(layout(a), layout(b), layout(c)))
    assert of_a == Product(layout(c), layout(b.T), dense("N", m, k))
    left, right, shape = (c.T, a, (n, k)) if b_order == "T" else (a.T, c, (k, n))
    assert of_b == Product(layout(left), layout(right), dense("N", *shape))
    assert np.allclose(left @ right, (a.T @ c).T if b_order == "T" else a.T @ c, rtol=1e-5)


@pytest.fixture
def announced(monkeypatch):
    """Kernels that were announced: those of gradients, and others."""
    found = []
    monkeypatch.setattr(kernel_cache, "compile_ahead", lambda needed, others, cc: found.append((needed, others)))
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    return found


def choice_of(product):
    return heuristics.choose(heuristics.problem(product, devices.get_device(0).properties))


def kernels_of(products):
    gpu = devices.get_device(0).properties.gpu
    return list(itertools.chain(*(choice_of(one).kernels(one, gpu) for one in products)))


def test_a_training_step_needs_the_kernels_that_are_compiled_ahead(announced):
    """The forward product of a linear layer, and its backward products."""
    device, (m, n, k) = devices.get_device(0), (4096, 6144, 2048)
    forward = Product(dense("N", m, k), dense("T", k, n), dense("N", m, n))
    backward = [
        Product(dense("N", m, n), dense("N", n, k), dense("N", m, k)),
        Product(dense("T", n, m), dense("N", m, k), dense("N", n, k)),
    ]
    stage = choice_of(forward).stage
    next_kernels.compile_ahead(device, stage, forward, "ieee")
    needed, others = announced[0]
    assert needed == kernels_of(backward)
    assert len(set(needed)) == 2
    assert not set(others) & set(needed)
    own = needed[0]
    next_kernels.compile_ahead(device, stage, forward, "ieee", [own])
    assert announced[1][0] == needed[1:], "the product compiles the other one itself"


@pytest.mark.parametrize("steps", ["gradients", "no gradients"])
def test_other_shapes_need_the_kernels_that_are_compiled_ahead(monkeypatch, announced, steps):
    """Those of five more are among the first three that are announced beside a product of odd extents."""
    if steps == "no gradients":
        monkeypatch.delitem(sys.modules, "torch")
    odd = [Product(dense("N", m, k), dense("N", k, n), dense("N", m, n)) for m, n, k in first_products_child.ODD]
    own = kernels_of(odd[:1])
    next_kernels.compile_ahead(devices.get_device(0), choice_of(odd[0]).stage, odd[0], "ieee", own)
    ((needed, others),) = announced
    assert len(needed) == (2 if steps == "gradients" else 0)
    assert set(kernels_of(odd)) <= {*own, *others[:3]}
    assert not set(others) & {*own, *needed}


@pytest.mark.parametrize(("step", "offset", "remainder"), [(4, 0, 0), (4, 0, 1), (8, 0, 0), (4, 4, 0)])
def test_other_extents_have_the_same_accesses(step, offset, remainder):
    """Rows may end anywhere, be apart, and begin anywhere."""
    m, n, k = 64, 128 + remainder, 32
    product = Product(Layout(m, k, step * k, 4, offset), Layout(k, n, 1024, 4), dense("N", m, n))
    found = next_kernels.other_extents(product)
    assert len({(one.m, one.n) for one in found}) == len(found) > 8
    stage, config = choice_of(product).stage, choice_of(product).config
    assert {stage.kernel(config, one) for one in found} == {stage.kernel(config, product)}
    assert {one.k for one in found} == {k}


@pytest.mark.parametrize(("a_order", "b_order"), list(itertools.product("NT", repeat=2)))
def test_lines_of_other_extents_do_not_overlap(a_order, b_order):
    """They begin at the same places within sectors of memory."""
    product = Product(dense(a_order, 64, 36), dense(b_order, 36, 128), dense("N", 64, 128))
    for found in next_kernels.other_extents(product):
        for one, before in zip(found[:3], product[:3], strict=True):
            apart, length = (one.row_stride, one.cols) if one.col_stride == 4 else (one.col_stride, one.rows)
            assert apart >= 4 * length
            assert (apart - max(before.row_stride, before.col_stride)) % 32 == 0
            assert min(one.row_stride, one.col_stride) == 4


def test_choices_for_products_that_may_follow_are_not_told(announced, caplog):
    caplog.set_level(logging.DEBUG, logger="numba_gemm")
    order = dense("N", 64, 64)
    product = Product(order, order, order)
    next_kernels.compile_ahead(devices.get_device(0), choice_of(product).stage, product, "ieee")
    assert announced
    assert caplog.records == []


def test_nothing_is_compiled_ahead_for_others(announced):
    device, order = devices.get_device(0), dense("N", 64, 64)
    product = Product(order, order, order)
    stage = choice_of(product).stage
    next_kernels.compile_ahead(device, stage, product._replace(epilogue=max), "ieee")
    next_kernels.compile_ahead(device, stage, product._replace(batch=product.batch._replace(extents=(1, 1, 2))), "ieee")
    next_kernels.compile_ahead(device, stage, Product(dense("N", 64, 0), dense("N", 0, 64), order), "ieee")
    assert not announced
    next_kernels.compile_ahead(device, STAGES["naive"], product, "ieee")
    assert announced == [([], [])]


def test_kernels_are_announced_before_they_are_compiled(torch, gpu, monkeypatch):
    """Once, with the product as the caller passed it; and not for kernels that are loaded."""
    seen = []
    monkeypatch.setattr(devices.Device, "before_compiling", staticmethod(lambda *what: seen.append(what)))
    monkeypatch.setattr(devices.Device, "_fetch", lambda device, kernels, before_compiling: before_compiling())
    for _ in range(2):
        tiled_sgemm(tensor(filled(4, 12)), tensor(filled(12, 8)))
    ((_, stage, product, precision, kernels),) = seen
    assert [kernel.name for kernel in kernels] == [gpu.launches[0].kernel]
    assert kernels[0].name.startswith(f"{stage.name}_")
    assert (product.m, product.n, product.k, precision) == (4, 8, 12, "ieee")
