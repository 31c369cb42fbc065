"""Results of the benchmark that are made up, and their files."""

import math

from blocks.tables import HEADLINE_SHAPES
from numba_gemm.kernels.ladder import STAGES
from numba_gemm.lab.bench import experiment, results
from numba_gemm.lab.bench.cases import Shape
from numba_gemm.lab.harness import command

# Rows as measured on a GPU, with the same times for every shape except for a test's changes.
SPEEDS = {"naive": 4000.0, "warp_tiled": 100.0, "auto": 101.0, "cublas": 105.0}
SHAPES = (*HEADLINE_SHAPES, Shape(2048, 2048, 2048))
GPU = {
    "name": "Test GPU",
    "multiprocessors": 132,
    "max_clock_mhz": 1980.0,
    "fp32_peak_gflops": 66900.0,
    "bandwidth_gb_s": 4800.0,
    "driver": "580.1",
    "cuda_driver_api": "13.0",
}
ENVIRONMENT = {
    "date": "2026-11-21T03:00:00+00:00",
    "command": "python bench.py",
    "seed": 1,
    "simulator": False,
    "commit": "0123456789ab",
    "gpu": GPU,
    "versions": {"numba-cuda": "0.30.4"},
    "python": "3.12.1",
}


def gpu_row(stage, shape, median, **changes):
    gflops = 2e-3 * math.prod(shape) / median
    row = dict.fromkeys(("m", "n", "k")) | dict(zip("mnk", shape))
    row |= {"stage": stage, "precision": "ieee", "layout": "nn", "cache": "hot", "median_us": median}
    row |= {"min_us": 0.98 * median, "p10_us": 0.99 * median, "mean_us": median, "p90_us": 1.01 * median}
    row |= {"max_us": 1.02 * median, "gflops": gflops, "percent_of_peak": gflops / 669, "status": "ok"}
    row |= {"ratio_to_cublas": SPEEDS["cublas"] / SPEEDS[stage], "error_in_bounds": 0.25, "host_us": 5.0}
    row["config"] = STAGES[stage].configs[0].name if stage in STAGES else ""
    row |= changes
    if stage in ("auto", "cublas") and row["status"] == "ok":
        alone = {"us": row["median_us"], "gflops": row["gflops"], "ratio_to_cublas": row["ratio_to_cublas"]}
        row = {f"steady_{name}": value for name, value in alone.items()} | row
    return row


def gpu_frame(**medians):
    """Return the results of a run; a keyword scales the times of one stage."""
    speeds = {stage: speed * medians.get(stage, 1.0) for stage, speed in SPEEDS.items()}
    return results.frame_of(
        gpu_row(stage, shape, speed * math.prod(shape) / 1e9, ratio_to_cublas=speeds["cublas"] / speed)
        for shape in SHAPES
        for stage, speed in speeds.items()
    )


def save(frame, described, folder):
    """Write the files of a run."""
    texts = (command.csv_text(frame), command.json_text(described))
    command.write_files(folder, dict(zip(experiment.EXPERIMENT.files, texts)))
