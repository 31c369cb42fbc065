"""Colours of the figures: of arrays, counts and lanes, of baselines and outlines.

A is blue, B orange and C green, and so are their shared tiles: the first letter of an array's name decides (`colour`).
Counts are a ramp from near white to that colour (`ramp`), and threads of a warp are shades around it (`shades`). Warps,
and units that move together, are outlined in black. In plots of speed, cuBLAS is black and dashed, the public
function's choice is vermillion, and the stages follow viridis. The colours are those of Okabe and Ito, which
colour-blind readers can tell apart (https://jfly.uni-koeln.de/color/).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ...device.units import WARP

if TYPE_CHECKING:
    from matplotlib.colors import Colormap

COLOURS = {"a": "#0072B2", "b": "#E69F00", "c": "#009E73"}  # of the matrices, and of arrays that hold parts of them
OTHER = "#CC79A7"  # of other arrays
CUBLAS, CHOICE, ACCENT = "black", "#D55E00", "#56B4E9"
OUTLINE = "black"  # of warps, and of sectors that move
GRID, UNUSED = "0.85", "0.75"


def colour(name: str) -> str:
    """Return an array's colour: that of the matrix whose letter its name begins with, else `OTHER`."""
    return COLOURS.get(name[:1].lower(), OTHER)


def mixed(name: str, share: float, other: str = "white") -> tuple[float, ...]:
    """Mix an array's colour, at the given share, with another colour."""
    from matplotlib.colors import to_rgb

    return tuple(share * x + (1 - share) * y for x, y in zip(to_rgb(colour(name)), to_rgb(other), strict=True))


def ramp(name: str) -> Colormap:
    """Return the colour map for counts of an array, from near white to its colour."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list(f"counts of {name}", [mixed(name, 0.12), mixed(name, 1.0)])


def shades(name: str, count: int = WARP) -> np.ndarray[Any, Any]:
    """Return the colours of `count` lanes that access an array, one row each, from light to dark around its colour."""
    from matplotlib.colors import LinearSegmentedColormap

    ends = [mixed(name, 0.15), mixed(name, 1.0), mixed(name, 0.45, "black")]
    made = LinearSegmentedColormap.from_list(f"lanes of {name}", ends)
    return np.asarray(made(np.linspace(0, 1, count)))
