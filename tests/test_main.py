"""The command ``numba-gemm``: its subcommands, their help, and what they say of arguments that are wrong."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import numba_gemm
from numba_gemm import __main__ as command
from numba_gemm import terminal

ROOT = Path(__file__).resolve().parents[1]


def numba_gemm_command(*arguments, **variables):
    """Run the command as a user without a GPU does, who did not ask for the simulator."""
    kept = {name: value for name, value in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}
    return subprocess.run(
        [sys.executable, "-m", "numba_gemm", *arguments],
        env=kept | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"} | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def status_of(*arguments):
    """Run the command in this process; return its exit status."""
    try:
        return command.main(arguments)
    except SystemExit as stopped:
        return stopped.code


# Modules that a subcommand's help may import beside the standard library's.
TABLES = {"numpy", "pandas"}
HELP_IMPORTS = {"precompile": {"numpy"}, "cache": {"numpy"}, "bench": TABLES, "lab": TABLES}
HEAVY = {"cupy", "matplotlib", "numba", "numpy", "pandas", "torch"}

IMPORTED = f"""
import sys
from numba_gemm.__main__ import main
try:
    main(sys.argv[1:])
except SystemExit as stopped:
    assert not stopped.code, stopped.code
print("imported:", *({HEAVY!r} & sys.modules.keys()), file=sys.stderr)
"""


@pytest.mark.parametrize("name", ["", *command.SUBCOMMANDS])
def test_help_imports_little_and_tells_the_exit_status(name):
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, *filter(None, [name, "--help"])],
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stderr.split()[1:]) <= HELP_IMPORTS.get(name, set())
    assert done.stdout.startswith(f"usage: {' '.join(['numba-gemm', name]).strip()} ")
    assert "Status 2" in done.stdout or "; 2 for " in done.stdout or "status 2" in done.stdout


# The options of `lab` depend on what it runs.
@pytest.mark.parametrize("name", [name for name in command.SUBCOMMANDS if name != "lab"])
def test_every_option_has_help(name):
    module, said = command.SUBCOMMANDS[name]
    parser = importlib.import_module(module).parser()
    assert isinstance(parser, terminal.Parser)
    assert parser.prog == f"numba-gemm {name}"
    assert said
    for action in parser._actions:
        assert action.help, action.dest
        optional = action.option_strings and action.nargs != 0 and not action.required
        if optional and "repeatable" not in action.help:
            assert "default: " in action.help.lower() or action.default is None, (
                f"{action.dest} does not tell its default"
            )


def test_help_lists_all_subcommands(capsys):
    assert status_of("--help") == 0
    listed = capsys.readouterr().out
    for name, (_, said) in command.SUBCOMMANDS.items():
        assert name in listed
        assert said in listed


def test_version(capsys):
    assert status_of("--version") == 0
    assert capsys.readouterr().out == f"numba-gemm {numba_gemm.__version__}\n"


def test_without_arguments_the_help_is_printed(capsys):
    assert status_of() == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("usage: numba-gemm ")


REFUSED = [
    ("compile", "invalid choice: 'compile'"),
    ("--fast", "required: COMMAND"),
    ("bench --rounds 0", "0 is not at least 1"),
    ("bench --rounds x", "'x' is not a whole number"),
    ("bench --shape 4,4", "is not M,N,K"),
    ("bench --sizes huge", "invalid choice: 'huge'"),
    ("bench --stages fast", "invalid choice: 'fast'"),
    ("bench --stages cpu --precisions fp7", "precision is 'fp7'; expected one of ieee"),
    ("bench --seed=-1", "is not from 0 to 4294967295"),
    ("bench --compare no/such/folder", "no results at no/such/folder"),
    ("bench --ceilings none.json", "give both"),
    ("bench naive", "unrecognized arguments: naive"),
    ("explain 64x64", "expected M, N and K"),
    ("explain 64x64x64 --stage fast", "stage is 'fast'"),
    ("explain 64x64x64 --dtype int8", "expected one of float32, float16, bfloat16, or two"),
    ("precompile --dtype float16,float16,float16", "expected one of float32, float16, bfloat16, or two"),
    ("autotune", "required: MxNxK"),
    ("autotune 64x64x64 --seconds no", "expected a number of seconds above 0"),
    ("precompile --cc 9", "cc is '9'; expected a compute capability"),
    ("precompile --import no/such/bundle", "No such file"),
    ("cache --all", "unrecognized arguments: --all"),
    ("inspect", "required: STAGE"),
    ("inspect naive --cc 9,0", "cc is '9,0'; expected a compute capability"),
    ("puzzle nonesuch", "unknown puzzle 'nonesuch'; the puzzles are element, product"),
    ("puzzle --hint", "give its NAME"),
    ("puzzle product --hint --solution", "not allowed with argument"),
    ("step", "required: STAGE"),
    ("step naive --thread 1,x", "'1,x' given; expected x, y and z"),
    ("step naive --shape 4,4", "'4,4' given; expected M, N and K"),
    ("step naive --thread 0 --thread 1", "several threads are for --html"),
    ("doctor --timeout 0", "expected a number of seconds above 0"),
    ("doctor --section all", "invalid choice: 'all'"),
    ("lab", "name one or more experiments"),
    ("lab nonesuch", "'nonesuch'"),
]


@pytest.mark.parametrize(("line", "says"), REFUSED, ids=[line for line, _ in REFUSED])
def test_a_wrong_argument_is_one_line(line, says, capsys):
    assert status_of(*line.split()) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("error: ")
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "variables", "says"),
    [
        ("nonesuch", {}, "invalid choice: 'nonesuch'"),
        ("explain 64x64x64", {"CUDA_VISIBLE_DEVICES": ""}, "Pass --cc 9.0 for a model of a GPU"),
        ("explain 64x64x64 --precision bf16x6", {"NUMBA_ENABLE_CUDASIM": "1"}, "no matrix instructions"),
        ("autotune 64x64x64", {"CUDA_VISIBLE_DEVICES": ""}, "Run this on a machine with a GPU"),
        ("precompile", {"CUDA_VISIBLE_DEVICES": ""}, "Pass --cc 9.0"),
        ("precompile --cc 3.5", {}, "expected one that stages run on and the compiler knows"),
        ("precompile --export /nonesuch/file --cc 9.0", {}, "expected a file in a directory that exists"),
        ("inspect persistent --precision nope", {}, "precision is 'nope'; expected one of"),
        ("step nonesuch", {}, "stage is 'nonesuch'; expected one of naive"),
        ("step naive --config 1x1", {}, "config is '1x1'"),
        ("step naive --thread 64", {}, "thread (64, 0, 0) is outside of the block"),
        ("step persistent", {}, "instructions that the simulator lacks"),
        ("step naive --html /nonesuch/player.html", {}, "No such file"),
        ("autotune 64x64x64", {"NUMBA_ENABLE_CUDASIM": "1"}, "unset NUMBA_ENABLE_CUDASIM"),
        ("precompile", {"CUDA_VISIBLE_DEVICES": ""}, "no GPU can be used"),
        ("precompile --cc 9.0", {"NUMBA_ENABLE_CUDASIM": "1"}, "unset NUMBA_ENABLE_CUDASIM"),
        ("inspect naive", {"NUMBA_ENABLE_CUDASIM": "1"}, "unset NUMBA_ENABLE_CUDASIM"),
        ("cache", {"NUMBA_GEMM_CACHE_SIZE": "much", "NUMBA_GEMM_CACHE_DIR": "/tmp"}, "NUMBA_GEMM_CACHE_SIZE is 'much'"),
        ("bench --shape 4096,4096,4096", {"CUDA_VISIBLE_DEVICES": ""}, "too large for the simulator"),
    ],
)
def test_what_cannot_be_done_is_one_line_with_status_2(line, variables, says):
    done = numba_gemm_command(*line.split(), **variables)
    assert done.returncode == 2
    assert not done.stdout
    assert done.stderr.startswith("error: ")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


# Subcommands where a package is missing; its import fails, as it does where it is not installed.
MISSING = [
    ("pandas", "bench --stages naive --shape 4,4,4", "pip install pandas"),
    ("matplotlib", "bench --stages naive --shape 4,4,4 --plot", "pip install matplotlib"),
    ("numba", "bench --list", "pip install 'numba-gemm[cu13]'"),
    ("pandas", "lab accuracy", "pip install pandas"),
    ("cuda", "explain 64x64x64 --cc 9.0", "pip install 'numba-gemm[cu13]'"),
]

WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None
from numba_gemm.__main__ import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(("package", "line", "advice"), MISSING)
def test_a_missing_package_is_named_in_one_line(package, line, advice, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, package, *line.split()],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "NUMBA_ENABLE_CUDASIM": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert advice in done.stderr
    assert done.stderr.count("\n") == 1


def test_bench_runs_on_the_simulator_without_a_gpu(tmp_path, on_gpu):
    """Outside a checkout, too: nothing but the package is needed."""
    done = subprocess.run(
        [sys.executable, "-m", "numba_gemm", "bench", "--stages", "naive", "--shape", "8,8,8", "--out", "here"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}
        | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("No GPU was used" in done.stdout) is not on_gpu
    assert (tmp_path / "here" / "report.md").is_file()


def test_step_prints_or_writes_a_player(tmp_path):
    done = numba_gemm_command("step", "naive", "--thread", "1,0", "--shape", "3,3,3")
    assert done.returncode == 0, done.stderr
    assert "    row = 1\n" in done.stdout
    assert done.stdout.rstrip().endswith("-- end of block (0, 0, 0) --")
    file = tmp_path / "player.html"
    done = numba_gemm_command("step", "naive", "--thread", "1", "--thread", "0", "--html", str(file))
    assert done.stdout == f"{file}: naive, block (0, 0, 0), threads (1, 0, 0), (0, 0, 0)\n"
    assert '"kernel":"naive"' in file.read_text(encoding="utf-8")


@pytest.mark.parametrize("module", ["numba_gemm.inspect", "numba_gemm.doctor", "numba_gemm.lab"])
def test_folders_are_the_same_subcommands(module):
    """`python -m numba_gemm.inspect` has no parser of its own."""
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True
    )
    assert done.stdout.startswith(f"usage: numba-gemm {module.rpartition('.')[2]} ".encode())
