"""Plots of recorded traces, of registers and memories, and of measured speeds."""

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
