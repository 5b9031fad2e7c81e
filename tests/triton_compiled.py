"""Compiles the kernels that launchers launch, ahead of time and without a GPU, for tests to look at the machine code.

A test module names calls of launchers, with tensors of real shapes on torch's "meta" device, which have shapes,
strides and alignments but no memory:

    from triton_compiled import Call, compile_calls

    def norm(rows: int) -> None:                      # at the module's top level: a child process finds it by name
        from pagedgen_kernels import triton as kernels
        x = torch.empty(rows, 4096, dtype=torch.bfloat16, device="meta")
        kernels.rms_norm(x, x[0], 1e-5)

    kernels = compile_calls({"norm": Call(norm, {"rows": 256})}, archs=(80, 90))
    assert kernels["norm", 90][0].count("LDG.E.128") > 0

The child runs without TRITON_INTERPRET, and with a driver that claims an NVIDIA GPU of that architecture; each launch
compiles, with the signature and the alignments that triton itself derives from the arguments, instead of running. A
launcher that falls back to `reference` reaches for values that meta tensors do not have, and so fails.

To run these tests on another version of triton, make an environment that holds only that version and finds the rest of
the packages in the usual one:

    python -m venv t36 && t36/bin/pip install --no-deps triton==3.6.0
    echo <site-packages of the usual environment> > t36/lib/python3.11/site-packages/base.pth
    t36/bin/pip install --no-deps -e . && t36/bin/python -m pytest tests/test_triton_*.py
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

H200_MULTIPROCESSORS = 132
A100_MULTIPROCESSORS = 108
# What launchers ask about the device, by their names in pagedgen_kernels.triton.launch.
DEVICE_QUESTIONS = ("DEVICE_TYPES", "multiprocessors", "has_wgmma")


@dataclass(frozen=True)
class Call:
    """A call to compile the launches of. function: at its module's top level. arguments: what JSON can hold."""

    function: Callable[..., None]
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CompiledKernel:
    """A launched kernel for one architecture.

    registers: of a thread. stack: bytes of local memory of a thread; spilled registers are there. shared: bytes of a
    block. grid: as it was launched. constants: the kernel's constexpr arguments. sass: the instructions, one a line.
    hash: the same for launches that run what was compiled once.
    """

    name: str
    arch: int
    grid: tuple[int, ...]
    num_warps: int
    num_stages: int
    registers: int
    stack: int
    shared: int
    constants: dict[str, Any]
    sass: str
    hash: str

    def count(self, pattern: str) -> int:
        """How many instructions match the regular expression, anywhere in their line."""
        return sum(re.search(pattern, line) is not None for line in self.sass.splitlines())

    def spills(self) -> int:
        """Instructions that touch local memory: zero unless registers are spilled or an array lies there."""
        return self.count(r"\b(STL|LDL)\b")

    def summary(self) -> str:
        return (
            f"{self.name} sm_{self.arch} warps {self.num_warps} stages {self.num_stages} registers {self.registers} "
            f"stack {self.stack} shared {self.shared} spills {self.spills()} instructions {self.count('')} "
            f"LDG.128 {self.count('LDG[.].*[.]128')} LDGSTS.128 {self.count('LDGSTS.*[.]128')} "
            f"LDGSTS {self.count('LDGSTS')} HMMA {self.count('HMMA')} HGMMA {self.count('HGMMA')}"
        )


def compile_calls(
    calls: Mapping[str, Call], archs: tuple[int, ...] = (80, 90)
) -> dict[tuple[str, int], list[CompiledKernel]]:
    """(name of the call, architecture) -> its launches in order. Takes seconds, and half a second for each kernel that
    triton's cache does not hold."""
    jobs = [
        [name, call.function.__module__, call.function.__qualname__, dict(call.arguments)]
        for name, call in calls.items()
    ]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "kernels.json"
        done = subprocess.run(
            [sys.executable, __file__, str(result)],
            input=json.dumps({"jobs": jobs, "archs": archs, "path": sys.path}),
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(result.read_text("utf-8"))
    return {
        (name, arch): [CompiledKernel(**kernel | {"grid": tuple(kernel["grid"])}) for kernel in kernels]
        for name, arch, kernels in found
    }


@contextmanager
def recording(arch: int) -> Iterator[list[CompiledKernel]]:
    """Launches inside compile for an NVIDIA GPU of this architecture, and are listed instead of run."""
    from pagedgen_kernels.triton import launch
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", arch, 32)

        def get_current_device(self) -> int:
            return arch  # triton keeps what it compiled by device

        def get_current_stream(self, device: int) -> int:
            return 0

    kernels: list[CompiledKernel] = []
    run, before = JITFunction.run, {name: getattr(launch, name) for name in DEVICE_QUESTIONS}

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        kernels.append(_look_at(kernel, self, grid, args, kwargs))
        return kernel

    driver.set_active(Driver())
    JITFunction.run, launch.DEVICE_TYPES = compile_only, ("meta",)
    launch.multiprocessors = lambda device: H200_MULTIPROCESSORS if arch == 90 else A100_MULTIPROCESSORS
    launch.has_wgmma = lambda device: arch == 90
    try:
        yield kernels
    finally:
        JITFunction.run = run
        vars(launch).update(before)


def _look_at(kernel: Any, function: Any, grid: Any, args: Any, kwargs: Any) -> CompiledKernel:
    from triton import knobs

    named = dict(zip(function.arg_names, args, strict=False)) | kwargs
    constants = {param.name: named[param.name] for param in function.params if param.is_constexpr}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        usage, listing = (
            subprocess.run([tool, *options, cubin.name], capture_output=True, text=True, check=True).stdout
            for tool, *options in (
                [knobs.nvidia.cuobjdump.path, "--dump-resource-usage"],
                [knobs.nvidia.nvdisasm.path, "-c"],
            )
        )
    used = {name: int(count) for name, count in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    lines = [re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line) for line in listing.splitlines()]
    metadata = kernel.metadata
    return CompiledKernel(
        name=function.__name__,
        arch=metadata.target.arch,
        grid=tuple(grid),
        num_warps=metadata.num_warps,
        num_stages=metadata.num_stages,
        registers=used["REG"],
        stack=used["STACK"] + used["LOCAL"],
        shared=metadata.shared,
        constants={name: value for name, value in constants.items() if isinstance(value, int | float | str | None)},
        sass="\n".join(line[1] for line in lines if line and line[1] != "NOP"),
        hash=kernel.hash,
    )


def main() -> None:
    """The child: jobs from stdin, their kernels into the file that is named."""
    work = json.load(sys.stdin)
    sys.path[:] = work["path"]
    found = []
    for arch in work["archs"]:
        for name, module, function, arguments in work["jobs"]:
            with recording(arch) as kernels:
                getattr(import_module(module), function)(**arguments)
            assert kernels, f"{name} launched nothing"
            found.append([name, arch, [asdict(kernel) for kernel in kernels]])
    Path(sys.argv[1]).write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main()
