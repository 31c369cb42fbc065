"""Kernels of a product's gradients: which products they are, and that they are compiled ahead."""

from __future__ import annotations

import itertools
import sys
import types

import numpy as np
import pytest
from support.array_libraries import tensor
from support.operands import filled

from numba_gemm import tiled_sgemm
from numba_gemm.gemm import gradients
from numba_gemm.kernels.product import Layout, Product, dense
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
    of_a, of_b = gradients.gradients(Product(layout(a), layout(b), layout(c)))
    assert of_a == Product(layout(c), layout(b.T), dense("N", m, k))
    left, right, shape = (c.T, a, (n, k)) if b_order == "T" else (a.T, c, (k, n))
    assert of_b == Product(layout(left), layout(right), dense("N", *shape))
    assert np.allclose(left @ right, (a.T @ c).T if b_order == "T" else a.T @ c, rtol=1e-5)


@pytest.fixture
def announced(monkeypatch):
    found = []
    monkeypatch.setattr(kernel_cache, "compile_ahead", lambda tasks: found.append([kernel for kernel, _ in tasks]))
    return found


def test_a_training_step_needs_the_kernels_that_are_compiled_ahead(monkeypatch, announced):
    """The forward product of a linear layer, and its backward products."""
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    device = devices.get_device(0)
    m, n, k = 4096, 6144, 2048
    forward = Product(dense("N", m, k), dense("T", k, n), dense("N", m, n))
    backward = [
        Product(dense("N", m, n), dense("N", n, k), dense("N", m, k)),
        Product(dense("T", n, m), dense("N", m, k), dense("N", n, k)),
    ]
    choices = [gradients.chosen("auto", 0, gradients.heuristics.problem(one, device.properties)) for one in backward]
    gradients.compile_ahead(device, choices[0].stage, forward, "ieee")
    needed = [choice.kernels(one, device.properties.gpu) for choice, one in zip(choices, backward)]
    assert announced == [list(itertools.chain(*needed))]
    assert len(set(announced[0])) == 2
    own = announced[0][0]
    gradients.compile_ahead(device, choices[0].stage, forward, "ieee", [own])
    assert announced[1] == [kernel for kernel in announced[0] if kernel is not own], "compiled by the product itself"


def test_nothing_is_compiled_ahead_for_others(monkeypatch, announced):
    device, order = devices.get_device(0), dense("N", 64, 64)
    product = Product(order, order, order)
    stage = gradients.chosen("auto", 0, gradients.heuristics.problem(product, device.properties)).stage
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    gradients.compile_ahead(device, stage, product, "ieee")
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    gradients.compile_ahead(device, stage, product._replace(epilogue=max), "ieee")
    gradients.compile_ahead(device, stage, product._replace(batch=product.batch._replace(extents=(1, 1, 2))), "ieee")
    gradients.compile_ahead(device, stage, Product(dense("N", 64, 0), dense("N", 0, 64), order), "ieee")
    assert not announced
    gradients.compile_ahead(device, gradients.heuristics.STAGES["naive"], product, "ieee")
    assert announced == [[]]


def test_kernels_are_announced_before_they_are_compiled(torch, gpu, monkeypatch):
    """Once, with the product as the caller passed it; and not for kernels that are loaded."""
    seen = []
    monkeypatch.setattr(devices.Device, "before_compiling", staticmethod(lambda *what: seen.append(what)))
    monkeypatch.setattr(devices.Device, "_fetch", lambda device, kernels, before_compiling: before_compiling())
    for _ in range(2):
        tiled_sgemm(tensor(filled(4, 12)), tensor(filled(12, 8)))
    ((_, stage, product, precision, kernels),) = seen
    assert [kernel.name for kernel in kernels] == [gpu.launches[0].kernel]
    assert (stage.name, product.m, product.n, product.k, precision) == ("stream_k", 4, 8, 12, "ieee")
