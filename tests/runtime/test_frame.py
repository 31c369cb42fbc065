"""Launches in memory as the driver reads them: words where the parameters point, and launches in order."""

from __future__ import annotations

import ctypes
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.host_gpu import LaunchConfig, attributes_of

from numba_gemm.kernels.product import Layout
from numba_gemm.kernels.step import (
    ALPHA,
    ALPHA_ONE,
    AT_A,
    AT_B,
    AT_C,
    BETA,
    BETA_ZERO,
    Kernel,
    MatrixAt,
    Moving,
    Scalar,
    Slot,
    Step,
    Vector,
    Words,
)
from numba_gemm.runtime import frame as frames
from numba_gemm.runtime.frame import ALWAYS, Frame, FrameLayout


def step_of(*arguments, grid=(1, 1, 1), block=(32, 1, 1), shared=0, overlaps=False, carve_out=-1, cluster=1):
    kernel = Kernel("k", lambda *_: None, lambda *_: (), None, None, shared, block[0])
    return Step(kernel, grid, block, arguments, overlaps, carve_out, cluster)


A, B, C = MatrixAt(AT_A, Layout(3, 5, 20, -4)), MatrixAt(AT_B, Layout(5, 4, 0, 4)), MatrixAt(AT_C, Layout(3, 4, 16, 4))
SCRATCH, COUNTERS = Moving(Slot.SCRATCH), Moving(Slot.COUNTERS)
PARTS = MatrixAt(Moving(Slot.SCRATCH, 4096), Layout(6, 64, 256, 4))
PRODUCT = step_of(ALPHA, A, B, BETA, C)


def values_of(layout):
    """Return values for the words that move: two numbers and addresses that differ."""
    return [1.5, -0.25, *((i + 1) << 44 for i in range(len(layout.moving) - 2))]


def parameters(step, place):
    """Return the addresses of a launch's parameters, and their values as the kernel reads them."""
    kinds = [
        ctypes.c_float if isinstance(argument, Scalar) else ctypes.c_int64
        for argument in step.arguments
        for _ in argument.words
    ]
    pointers = [*(ctypes.c_void_p * len(kinds)).from_address(place)]
    return pointers, [kind.from_address(pointer).value for kind, pointer in zip(kinds, pointers, strict=True)]


def memory_of(layout):
    """Return memory, and the address of each launch's parameters."""
    memory, places, _ = layout.memory()
    return memory, [ctypes.addressof(memory) + place for place in places]


def bits(value):
    """Return the word of a constant float."""
    return struct.unpack("<q", struct.pack("<f4x", value))[0]


def check_words(steps, layout, places, values):
    """Check that every parameter of every launch has its value, and that equal moving words are one."""
    known = dict(zip(layout.moving, values, strict=True))
    shared = {}
    for step, place in zip(steps, places, strict=True):
        words = [word for argument in step.arguments for word in argument.words]
        pointers, found = parameters(step, place)
        kinds = [type(argument) for argument in step.arguments for _ in argument.words]
        seen = [
            bits(value) if kind is Scalar and not isinstance(word, Moving) else value
            for value, kind, word in zip(found, kinds, words, strict=True)
        ]
        assert seen == [known[word] if isinstance(word, Moving) else word for word in words]
        for word, pointer in zip(words, pointers, strict=True):
            assert pointer % 8 == 0
            if isinstance(word, Moving):
                assert shared.setdefault(word, pointer) == pointer
    assert len(set(shared.values())) == len(shared)


STEPS = {
    "scalar, matrix, vector": ([step_of(ALPHA, A, Vector(0, 7, 28))], [Moving(Slot.VECTORS)]),
    "product": ([PRODUCT], []),
    "NumPy's integers": (
        [step_of(ALPHA, MatrixAt(AT_A, Layout(*np.array([3, 5, 20, 4]))), Words((np.int64(-7), SCRATCH)))],
        [SCRATCH],
    ),
    "nothing moves": ([step_of(Words((1, -2, 1 << 62)))], []),
    "nothing": ([step_of()], []),
    "schedule": ([step_of(ALPHA, A, B, BETA, C, Words((SCRATCH, COUNTERS, 3, 0, 9)))], [SCRATCH, COUNTERS]),
    "schedule without memory": ([step_of(ALPHA, A, B, BETA, C, Words((0, 0, 3, 0, 9)))], []),
    "epilogue": (
        [step_of(ALPHA, A, B, BETA, C, Words((SCRATCH, COUNTERS)), Vector(0, 4, 4), Vector(1, 3, -8))],
        [SCRATCH, COUNTERS, Moving(Slot.VECTORS), Moving(Slot.VECTORS + 1)],
    ),
    "maps": (
        [step_of(ALPHA, Words((Moving(Slot.FIRST_MAP),)), Words((Moving(Slot.SECOND_MAP),)), BETA, C, Words((5,)))],
        [Moving(Slot.FIRST_MAP), Moving(Slot.SECOND_MAP)],
    ),
    "parts of operands": (
        [
            step_of(
                ALPHA, A, MatrixAt(Moving(Slot.C, 64), C.layout), MatrixAt(Moving(Slot.A, 256), A.layout), PARTS, BETA
            )
        ],
        [Moving(Slot.A, 256), Moving(Slot.C, 64), PARTS.place],
    ),
    "three steps": (
        [
            step_of(A, PARTS, B, Words((0, 7))),
            step_of(A, MatrixAt(SCRATCH, PARTS.layout), PARTS, B, Words((1,))),
            step_of(ALPHA, PARTS, MatrixAt(SCRATCH, PARTS.layout), BETA, C, A, B, Words((1, 2)), Vector(0, 4, 4)),
        ],
        [SCRATCH, PARTS.place, Moving(Slot.VECTORS)],
    ),
}


@pytest.mark.parametrize("case", STEPS)
def test_words_are_where_the_parameters_point(case):
    steps, others = STEPS[case]
    layout = FrameLayout(steps)
    assert layout.moving == (*ALWAYS, *others), "the order in which a bound product passes their values"
    memory, places = memory_of(layout)
    for values in (values_of(layout), [0.0, 1.0, *range(-16, 16 * (len(layout.moving) - 3), 16)]):
        layout.packing.pack_into(memory, 0, *values)
        check_words(steps, layout, places, values)


def test_values_of_a_kernel_s_parameters():
    layout = FrameLayout([step_of(ALPHA_ONE, BETA_ZERO)])
    memory, (place,) = memory_of(layout)
    assert parameters(step_of(ALPHA_ONE, BETA_ZERO), place)[1] == [1.0, 0.0]
    steps, _ = STEPS["scalar, matrix, vector"]
    layout = FrameLayout(steps)
    memory, (place,) = memory_of(layout)
    layout.packing.pack_into(memory, 0, 1.5, 0.0, 4096, 0, 0, 8192)
    assert parameters(steps[0], place)[1] == [1.5, 4096, 3, 5, 20, -4, 0, 0, 7, 4, 8192, 7, 28]


words = st.integers(-(1 << 63), (1 << 63) - 1) | st.builds(
    Moving, st.integers(Slot.A, Slot.VECTORS + 2), st.integers(0, 3).map(lambda i: 256 * i)
)
arguments = st.sampled_from([ALPHA, BETA, ALPHA_ONE, BETA_ZERO, A, B, C, PARTS]) | st.builds(
    Words, st.lists(words, max_size=6).map(tuple)
)


@given(st.lists(st.lists(arguments, max_size=6).map(lambda some: step_of(*some)), min_size=1, max_size=4))
def test_any_steps(steps):
    layout = FrameLayout(steps)
    assert len(set(layout.moving)) == len(layout.moving)
    memory, places = memory_of(layout)
    layout.packing.pack_into(memory, 0, *values_of(layout))
    check_words(steps, layout, places, values_of(layout))


# ---------------------------------------------------------------------------------------------------------- launches


class Driver:
    """Stand-in for two functions of the driver; reads a launch as the driver does."""

    def __init__(self, steps):
        self.steps, self.launched, self.status, self.context = steps, [], 0, None

    def raw(self, name):
        return {"cuLaunchKernelEx": self.launch, "cuCtxGetCurrent": self.get_current}[name]

    def launch(self, config, handle, place, extra):
        assert extra is None
        config, handle, place = (ctypes.cast(pointer, ctypes.c_void_p).value for pointer in (config, handle, place))
        given = LaunchConfig.from_address(config)
        step = self.steps[len(self.launched) % len(self.steps)]
        shape = tuple(given.grid), tuple(given.block), given.shared, *attributes_of(given)
        self.launched.append((handle, *shape, given.stream or 0, parameters(step, place)[1]))
        return self.status

    def get_current(self, place):
        place._obj.value = self.context
        return 0


@pytest.fixture
def made(monkeypatch):
    """Two launches of a frame, and the driver that it calls."""
    steps = [
        step_of(A, PARTS, grid=(6, 3, 1), cluster=2),
        step_of(ALPHA, PARTS, BETA, C, grid=(5, 1, 2), block=(64, 2, 1), shared=1 << 16, overlaps=True, carve_out=58),
    ]
    driver = Driver(steps)
    monkeypatch.setattr(frames, "raw", driver.raw)
    layout = FrameLayout(steps)
    return driver, layout, lambda: Frame(layout, [111, 222], 77)


def test_parts_of_operands_move_with_them(monkeypatch):
    """Also where only scalars and operands are told."""
    (step,), (first, second, _) = STEPS["parts of operands"]
    driver = Driver([step])
    monkeypatch.setattr(frames, "raw", driver.raw)
    layout = FrameLayout([step])
    assert layout.parts == (first, second)
    frame = Frame(layout, [111], None)
    frame.move(2.0, 0.5, 4096, 0, 512, 1 << 20)
    frame.launch(0)
    for a, c in ((4096, 512), (8192, 1024)):
        driver.launched.clear()
        frame.move_operands(2.0, 0.5, a, 0, c)
        frame.launch(0)
        ((*_, found),) = driver.launched
        assert [found[1], found[6], found[11], found[16]] == [a, c + 64, a + 256, 1 << 20]


def test_launches_in_order_on_a_stream(made):
    driver, _, new_frame = made
    frame = new_frame()
    for stream, a in ((0, 4096), (9, 8192), (9, 0), (0, 4096)):
        driver.launched.clear()
        frame.move(2.0, 0.5, a, 0, 512, 1 << 20)
        frame.launch(stream)
        assert driver.launched == [
            (111, (6, 3, 1), (32, 1, 1), 0, False, -1, 2, stream, [a, 3, 5, 20, -4, 1 << 20, 6, 64, 256, 4]),
            (
                *(222, (5, 1, 2), (64, 2, 1), 1 << 16, True, 58, 1, stream),
                [2.0, 1 << 20, 6, 64, 256, 4, 0.5, 512, 3, 4, 16, 4],
            ),
        ]


def test_frames_of_one_layout_have_memory_of_their_own(made):
    driver, _, new_frame = made
    first, second = new_frame(), new_frame()
    first.move(1.0, 0.0, 16, 0, 32, 48)
    second.move(2.0, 0.0, 64, 0, 80, 96)
    first.launch(0)
    second.launch(0)
    first.launch(0)
    assert [words[0] for *_, words in driver.launched] == [16, 1.0, 64, 2.0, 16, 1.0]


@pytest.mark.parametrize(("context", "expected"), [(77, True), (78, False), (None, False)])
def test_in_context(made, context, expected):
    driver, _, new_frame = made
    driver.context = context
    assert new_frame().in_context() is expected


def test_a_refused_launch_raises(made, monkeypatch):
    driver, _, new_frame = made
    monkeypatch.setattr(frames, "failure", lambda name, status: RuntimeError(f"{name} {status}"))
    driver.status = 719
    with pytest.raises(RuntimeError, match="cuLaunchKernelEx 719"):
        new_frame().launch(0)
    assert len(driver.launched) == 1, "those after it are not enqueued"


def test_attributes_that_two_threads_make_are_those_that_stay(monkeypatch):
    """Launches point to them, so what one thread has been given must not be replaced by what another one makes."""
    real, first = frames._LaunchAttribute, []

    class Late(real):
        def __init__(self, *values):
            super().__init__(*values)
            if not first:  # another thread makes the same, and is done first
                first.append(None)
                first[0] = frames.attributes_of(True, 37, 2)

    monkeypatch.setattr(frames, "_attributes", {})
    monkeypatch.setattr(frames, "_LaunchAttribute", Late)
    assert frames.attributes_of(True, 37, 2) == first[0] == frames.attributes_of(True, 37, 2)
