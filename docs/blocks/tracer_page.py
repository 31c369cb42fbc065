"""Block of docs/tracing.md: the tracer's counts beside those of a GPU."""

import pandas as pd

from blocks.published import Published, source
from numba_gemm.lab.bench.cases import Shape


def tracer(found: Published) -> str:
    """Sentences on how many of the counts are equal, and how far the others are apart."""
    rows, how = found.measured("tracer_counted", "tracer.csv")
    frame = pd.DataFrame(rows)
    shapes = frame[["m", "n", "k"]].value_counts()
    apart = frame[frame["counted"] != frame["traced"]]
    said = (
        f"At {Shape(*shapes.index[0])}, {frame['stage'].nunique()} stages have {len(frame)} numbers: requests and "
        "sectors of global loads and stores, requests and wavefronts of shared loads, stores and copies. "
        f"{len(frame) - len(apart)} are equal."
    )
    if len(apart):
        stages = " and ".join(f"`{stage}`" for stage in apart["stage"].unique())
        most = 100 * (apart["ratio"] - 1).abs().max()
        said += f" The other {len(apart)}, of {stages}, differ by at most {most:.2g} %."
    return f"{said}\n\n{source(how)}"
