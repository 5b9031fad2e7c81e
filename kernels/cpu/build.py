"""Builds the C++ kernels with the system's compiler, once for each machine and version of the sources."""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

FLAGS = (
    "-std=c++17",
    "-O3",
    "-fno-tree-vectorize",  # the kernels say themselves what is a vector; trying takes the compiler long
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
)
NATIVE = "-march=native"  # some compilers for ARM do not know it; then the build goes on without
LIBRARY_NAME = "kernels.so"


class BuildError(Exception):
    """The kernels could not be built; the message says why, in one line."""


def build() -> Path:
    """The path of the compiled kernels, building them when the cache has none for these sources, flags, compiler and
    CPU.

    The cache is $XDG_CACHE_HOME/pagedgen/kernels, by default under ~/.cache. Several processes may build at once: each
    builds in a folder of its own and the result is moved into place atomically.

    Raises: BuildError when there is no compiler, it fails, or the cache cannot be written.
    """
    compiler = find_compiler()
    sources = sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".cpp", ".h"))
    library = cache_folder() / _fingerprint(compiler, sources) / LIBRARY_NAME
    if library.exists():
        return library
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            units = [path for path in sources if path.suffix == ".cpp"]
            os.replace(_compile(compiler, units, Path(folder)), library)
    except OSError as error:
        raise BuildError(f"the kernel cache {library.parent} cannot be written: {error.strerror}") from error
    return library


def find_compiler() -> list[str]:
    """The command that compiles C++: $CXX when set, else the first of c++, g++ and clang++ on the path.

    Raises: BuildError when there is none.
    """
    chosen = os.environ.get("CXX", "").split()
    for command in [chosen] if chosen else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    raise BuildError(f"the compiler {chosen[0]} named by CXX was not found" if chosen else "no C++ compiler was found")


def cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "pagedgen" / "kernels"


def _fingerprint(compiler: list[str], sources: list[Path]) -> str:
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout
    for part in (" ".join([*compiler, *FLAGS, NATIVE]).encode(), version, _cpu_features()):
        digest.update(part + b"\0")
    return digest.hexdigest()[:24]


def _cpu_features() -> bytes:
    """What `-march=native` depends on: a cache shared by different machines must not mix their builds up."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}".encode()
    names = (b"model name", b"flags", b"Features", b"CPU part")
    return b"\n".join(sorted({line for line in lines if line.startswith(names)}))


def _compile(compiler: list[str], units: list[Path], folder: Path) -> Path:
    errors = ""
    for flags in ((*FLAGS, NATIVE), FLAGS):
        jobs = [
            subprocess.Popen(
                [*compiler, *flags, "-c", str(unit), "-o", str(folder / f"{unit.stem}.o")],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for unit in units
        ]
        messages = [job.communicate()[1] for job in jobs]
        errors = "".join(message for job, message in zip(jobs, messages, strict=True) if job.returncode)
        if not errors and all(job.returncode == 0 for job in jobs):
            break
    else:
        raise BuildError(f"{compiler[0]} cannot compile the kernels: {_first_error(errors)}")
    library = folder / LIBRARY_NAME
    objects = [str(folder / f"{unit.stem}.o") for unit in units]
    # The threads' runtime is found in the process that loads the library, never linked: there must be only one.
    link = subprocess.run(
        [*compiler, "-shared", "-pthread", *objects, "-o", str(library)], capture_output=True, text=True, check=False
    )
    if link.returncode:
        raise BuildError(f"{compiler[0]} cannot link the kernels: {_first_error(link.stderr)}")
    return library


def _first_error(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "it gave no reason")
