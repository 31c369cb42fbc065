"""Plots of recorded traces, of registers and memories, and of measured speeds; docs/tracing.md shows how to call them.

Each function returns a matplotlib Figure, about 700 pixels wide. ``savefig`` writes it to a file; a notebook shows it
after ``%matplotlib inline``.

All figures use the same colours. A is blue, B orange and C green, and so are their shared tiles: the first letter of an
array's name decides (`colour`). Counts are a ramp from near white to that colour (`ramp`), and threads of a warp are
shades around it (`shades`). Warps, and units that move together, are outlined in black. In plots of speed, cuBLAS is
black and dashed, the public function's choice is vermillion, and the stages follow viridis. The colours are those of
Okabe and Ito, which colour-blind readers can tell apart (https://jfly.uni-koeln.de/color/).
"""

from .all_accesses import timeline, who_reads_what
from .canvas import alt_text
from .memories import Memory, memory_hierarchy
from .one_array import reuse_map, thread_map
from .one_request import bank_map, sector_map
from .palette import ACCENT, CHOICE, COLOURS, CUBLAS, OTHER, OUTLINE, colour, ramp, shades
from .registers import register_banks
from .schedules import Event, Piece, schedule, sequence
from .speeds import BASELINES, ladder_chart, roofline_chart, stage_styles

__all__ = [
    "ACCENT",
    "BASELINES",
    "CHOICE",
    "COLOURS",
    "CUBLAS",
    "OTHER",
    "OUTLINE",
    "Event",
    "Memory",
    "Piece",
    "alt_text",
    "bank_map",
    "colour",
    "ladder_chart",
    "memory_hierarchy",
    "ramp",
    "register_banks",
    "reuse_map",
    "roofline_chart",
    "schedule",
    "sector_map",
    "sequence",
    "shades",
    "stage_styles",
    "thread_map",
    "timeline",
    "who_reads_what",
]
