"""The kernels' tests once more, with kernels that were compiled to find errors of memory, of threads and of C++."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pagedgen_kernels.cpu.build import BuildError, find_compiler

TESTS = Path(__file__).parent
KERNELS = ["test_kernels_cpu.py", "test_kernels_sampling.py", "test_kernels_linear.py", "test_kernels_quantized.py"]


def runtime(name: str) -> tuple[list[str], str]:
    """The compiler, and where its sanitizer's runtime lies."""
    try:
        compiler = find_compiler()
    except BuildError as error:
        pytest.skip(str(error))
    found = subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    if not Path(found.stdout.strip()).is_absolute():
        pytest.skip(f"{compiler[0]} has no {name}")
    return compiler, found.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sanitizers", "name", "options"),
    [
        ("address,undefined", "libasan.so", {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "halt_on_error=1"}),
        ("thread", "libtsan.so", {"TSAN_OPTIONS": "halt_on_error=1"}),
    ],
)
def test_kernels_run_clean(sanitizers: str, name: str, options: dict[str, str], tmp_path: Path) -> None:
    compiler, library = runtime(name)
    environment = {
        **os.environ,
        **options,
        "CXX": " ".join([*compiler, f"-fsanitize={sanitizers}", "-fno-omit-frame-pointer"]),
        "XDG_CACHE_HOME": str(tmp_path),
    }
    environment.pop("PAGEDGEN_DISABLE_CPP", None)
    # Beforehand: a compiler that has the sanitizer's runtime in its process as well takes many times as long.
    build = [sys.executable, "-c", "from pagedgen_kernels.cpu.build import build; build()"]
    subprocess.run(build, env=environment, check=True)
    command = [sys.executable, str(TESTS / "sanitized.py"), *(str(TESTS / test) for test in KERNELS)]
    environment["LD_PRELOAD"] = library
    ran = subprocess.run(command, env=environment, cwd=TESTS, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"[-8000:]
    assert " passed" in ran.stdout or "[100%]" in ran.stdout
    assert list(tmp_path.rglob("kernels.so")), "the kernels were not built for it"
