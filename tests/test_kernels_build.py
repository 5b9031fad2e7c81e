"""Building, caching and loading the C++ kernels, and what happens when that fails."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pagedgen_kernels import cpu, reference
from pagedgen_kernels.cpu import build, library

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="there is no C++ compiler"
)


@pytest.fixture
def fresh_load() -> Iterator[None]:
    """Forgets the library that is loaded, before and after, so that a test's environment decides."""
    library.load.cache_clear()
    yield
    library.load.cache_clear()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("PAGEDGEN_DISABLE_CPP", raising=False)
    return tmp_path / "pagedgen" / "kernels"


@pytest.mark.usefixtures("fresh_load")
def test_disabled_kernels_say_so_and_the_launchers_still_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDGEN_DISABLE_CPP", "1")
    assert not cpu.available()
    assert cpu.unavailable_reason() == "PAGEDGEN_DISABLE_CPP is set"
    x = torch.randn(4, 64)
    assert torch.equal(cpu.rms_norm(x, x[0], 1e-5), reference.rms_norm(x, x[0], 1e-5))
    assert torch.equal(cpu.greedy_argmax(x), x.argmax(-1))


@pytest.mark.usefixtures("fresh_load", "cache")
def test_without_a_compiler_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert not cpu.available()
    assert cpu.unavailable_reason() == "no C++ compiler was found"
    library.load.cache_clear()
    monkeypatch.setenv("CXX", "missing-c++ -O2")
    assert cpu.unavailable_reason() == "the compiler missing-c++ named by CXX was not found"


@pytest.mark.usefixtures("fresh_load")
def test_a_failing_compiler_leaves_nothing_in_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = cache.parent.parent / "broken"
    compiler.write_text("#!/bin/sh\necho 'note: trying' >&2\necho 'fatal error: out of ideas' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert not cpu.available()
    assert cpu.unavailable_reason() == f"{compiler} cannot compile the kernels: fatal error: out of ideas"
    assert [path for path in cache.rglob("*") if path.is_file()] == []


@needs_compiler
@pytest.mark.usefixtures("fresh_load")
def test_an_unwritable_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.delenv("PAGEDGEN_DISABLE_CPP", raising=False)
    assert not cpu.available()
    assert str(tmp_path / "file") in cpu.unavailable_reason()


@needs_compiler
def test_the_cache_is_keyed_by_flags_and_is_hit(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Path] = []

    def compile_nothing(compiler: list[str], units: list[Path], folder: Path) -> Path:
        built.append(folder)
        (folder / "kernels.so").write_bytes(b"")
        return folder / "kernels.so"

    monkeypatch.setattr(build, "_compile", compile_nothing)
    first = build.build()
    assert first.parent.parent == cache
    assert build.build() == first
    assert len(built) == 1
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DOTHER"))
    assert build.build() != first
    assert [path for path in cache.rglob("*") if path.name.startswith("tmp")] == []


@needs_compiler
@pytest.mark.slow
def test_processes_that_build_at_once_all_load_the_result(cache: Path) -> None:
    program = "import torch; from pagedgen_kernels import cpu; print(cpu.available(), cpu.unavailable_reason())"
    jobs = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [job.communicate()[0].strip() for job in jobs] == ["True"] * 3
    assert [path.name for path in cache.rglob("*") if path.is_file()] == [build.LIBRARY_NAME]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
@pytest.mark.skipif(not cpu.available(), reason="the C++ kernels are off")
def test_kernels_run_on_the_threads_that_torch_has() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        torch.randn(1 << 20).exp_()  # starts torch's own team
        before = set(os.listdir("/proc/self/task"))
        x = torch.randn(4000, 64)
        for _ in range(3):
            cpu.silu_mul(x)
        assert set(os.listdir("/proc/self/task")) == before
    finally:
        torch.set_num_threads(threads)
